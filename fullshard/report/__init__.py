"""One page about one or several runs: the verdict, curves, settings, events, samples and checkpoints."""
