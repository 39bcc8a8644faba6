"""Evaluations of audio language models."""
