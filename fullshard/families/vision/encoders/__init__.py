"""Encoders of vision-language models."""
