"""Encoders: texts and conversations to tokens."""
