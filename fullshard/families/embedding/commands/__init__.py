"""Commands of the embedding family."""
