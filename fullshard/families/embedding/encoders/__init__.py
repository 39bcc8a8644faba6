"""Encoders: records with queries, positives and negatives to samples."""
