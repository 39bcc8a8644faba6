"""Objectives of denoising: DDPM and flow matching."""
