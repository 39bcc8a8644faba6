"""Objectives of audio language models."""
