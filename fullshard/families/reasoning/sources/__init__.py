"""Sources of questions and reasoning."""
