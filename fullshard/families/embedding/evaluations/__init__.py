"""Evaluations of embeddings: retrieval, search and rank correlation."""
