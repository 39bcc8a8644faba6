"""Losses that compare embeddings, one file per `objective.loss.kind`. Any family with embeddings may use them."""
