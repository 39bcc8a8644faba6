"""Triton kernels that make DiT faster on CUDA in half precision. Optional: without them diffusers' own code runs.

What they are for: at batch sizes that fill a GPU, a third of a DiT step goes into reading and writing activations
between matrix products. These kernels fuse such passes. Parameters and checkpoints stay diffusers' own, and so do
results, to rounding. Measured on one H200 with DiT-XL/2, latents of 4 x 32 x 32, batch 256: 685 images/s, against 611
for diffusers with compiled blocks and 450 for plain diffusers (benchmarks/README.md).

Who calls them: `models/diffusers.py` calls `fused.fuse` in `choose_kernels`, and nothing else imports this folder. The
line `attention` of the run summary says what was fused.

How to switch them off: FULLSHARD_DIT_KERNELS=0. They also stay off on a CPU, in fp32, without Triton, and for every
architecture but DiT. To remove them for good, delete this folder and `Diffusers.choose_kernels`.
"""
