"""Objectives of language models."""
