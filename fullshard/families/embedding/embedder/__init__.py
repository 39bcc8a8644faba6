"""A Transformers backbone as an embedding model: pooling, Dense layers, and folders of sentence-transformers."""
