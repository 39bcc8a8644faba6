"""LoRA adapters: settings, injection into a module, PEFT folders, and merging into the weights."""
