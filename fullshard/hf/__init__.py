"""What the families that use Transformers share: models, weights, tokenizers and adapters. Knows no family.

    architecture/   configs and named sizes, empty modules, attention kernels, the output head
    weights/        stored tensors read in row slices, values for `model.from`, fresh values
    tokenizers/     loaded, trained, and compared with the one that stored weights were trained with
    adapters/       LoRA: settings, injection, PEFT folders, merging

`transformers_model.py` puts them together as a model part; `export.py` writes what `from_pretrained` reads.
"""
