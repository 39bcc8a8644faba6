"""Models of audio language models."""
