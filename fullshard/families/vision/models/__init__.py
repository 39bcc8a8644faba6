"""Models of vision-language models."""
