"""Models that give embeddings."""
