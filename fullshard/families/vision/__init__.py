"""Vision-language models: images and text in, text out, and the events of a desktop.

Besides the folders that every family may have:

    desktop/    recordings of screens, keys and mouse: rows to events, events to tokens, episodes to windows
"""
