"""Models: the denoiser, and the frozen VAE and text encoder beside it."""
