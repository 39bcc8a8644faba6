"""Language models that reason: records of question, reasoning and answer, learned by two losses at once.

Models and the layout of conversations are those of other token models: see `fullshard.text` and `fullshard.hf`.
"""
