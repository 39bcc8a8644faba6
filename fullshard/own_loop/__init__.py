"""Training from Python: a recipe in one call, and sharding, saving and loading for those who keep their own loop."""
