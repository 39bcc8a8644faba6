"""Objectives of vision-language models."""
