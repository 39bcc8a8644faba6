"""Embedding models: one vector per text (or text with images), trained so that matching texts are close.

Besides the folders that every family may have:

    embedder/   a Transformers backbone as an embedding model: pooling, Dense layers, sentence-transformers folders
    batching/   the texts of a step: cut into chunks, packed into rows, run twice with the same random numbers
    mining/     what `fullshard mine` does: embed a corpus, search it, choose hard negatives

How embeddings are compared (InfoNCE, triplet, ...) is in `fullshard.similarity`.
"""
