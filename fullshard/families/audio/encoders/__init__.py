"""Encoders of records with audio."""
