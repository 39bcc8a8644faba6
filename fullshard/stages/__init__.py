"""Stages: several runs in a row, each from where the one before it ended, described by one recipe.

Every stage becomes a complete recipe of its own, with a run folder of its own inside the run's, so everything that
works for a run works for a stage. What starts ranks is handed in as functions: this package is below `recipes`.
"""
