"""Encoders of records with reasoning."""
