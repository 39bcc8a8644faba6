"""Encoders: records with images, latents, labels and texts to samples."""
