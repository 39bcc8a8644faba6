"""The trained model: which architectures exist, how each is called, what a batch gives it, and how it is stored."""
