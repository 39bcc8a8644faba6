"""Frozen text encoders: their settings, texts to tokens, tokens to states, and how several encoders are combined."""
