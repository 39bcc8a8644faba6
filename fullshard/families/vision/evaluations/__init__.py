"""Evaluations of vision-language models."""
