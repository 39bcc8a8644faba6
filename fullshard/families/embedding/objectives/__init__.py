"""Objectives of embedding models, and their Matryoshka dimensions."""
