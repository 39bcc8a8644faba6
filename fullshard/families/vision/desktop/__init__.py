"""Desktop recordings as training data. Nothing here knows models, tokenizers or ranks.

rows.py  →  episodes.py  →  windows.py, with one of the event formats
a row       its episode     text with event tokens, and screens

events.py          what can happen: a screen, a key, a mouse
factorized.py, hierarchical.py, json_events.py
                   the event formats: events to text and back
screens.py         pictures of screens: files, bytes, frames of videos
transcript.py      a window for a person to read
actions.py         what a model should have predicted, by type, and what guessing would get
"""
