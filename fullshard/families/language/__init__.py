"""Language models: next-token prediction on text and conversations (pre-training and supervised fine-tuning).

The loss and the model code are shared with other token models: see `fullshard.text` and `fullshard.hf`.
"""
