"""Audio language models: speech and sound with text in, text out; and speech to text by encoder and decoder."""
