"""Desktop recordings as training data. Nothing here knows models or ranks.

rows.py  →  episodes.py  →  windows.py, with one of the event formats
a row       its episode     text with event tokens, and screens

events.py          what can happen: a screen, a key, a mouse
factorized.py, hierarchical.py, json_events.py
                   the event formats: events to text and back
screens.py         pictures of screens: files, bytes, frames of videos
spans.py           tokens back to events
transcript.py      the tokens of a window in words
actions.py         scores of predicted actions by type, and the frequency baseline
"""
