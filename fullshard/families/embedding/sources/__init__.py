"""Sources of text pairs."""
