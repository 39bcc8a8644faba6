"""Evaluations of language models."""
