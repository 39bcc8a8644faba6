"""Diffusion models: denoisers of diffusers, trained on images or latents, with labels, texts or neither.

Besides the folders that every family may have:

    denoiser/   the trained model: architectures, inputs, checks, initial weights, diffusers folders
    sampling/   images from noise: the sampler, batches over ranks, images of a finished run
    text/       frozen text encoders: tokens to states, and how several encoders are combined
    vae/        the frozen VAE: images to latents and back
    kernels/    optional Triton kernels for DiT; see its docstring

`keyed_noise.py` draws every random number of training and sampling; `pipeline_parts.py` finds the frozen parts of a
diffusers pipeline.
"""
