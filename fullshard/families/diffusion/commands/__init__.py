"""Commands of the diffusion family."""
