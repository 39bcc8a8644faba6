"""Objectives of models that reason."""
