"""Configs and named sizes, empty modules, attention kernels, the output head, and probes on a tiny copy of a model."""
