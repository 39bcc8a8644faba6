"""Values of a model's parameters: stored tensors read in row slices, `model.from`, and fresh values."""
