"""Evaluations of image models: pictures, FID, and a classifier of the user's."""
