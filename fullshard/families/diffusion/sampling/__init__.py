"""Images from noise: the sampler, batches of images over all ranks, and the images of a finished run."""
