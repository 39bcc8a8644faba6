"""Sources of clips with text."""
