"""The frozen VAE: images to latents and back, and the settings of `data.encode.vae`."""
