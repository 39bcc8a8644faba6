"""Sources of images with text, and of desktop recordings."""
