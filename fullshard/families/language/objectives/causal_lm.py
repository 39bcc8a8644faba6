"""Next-token prediction for language models: pre-training and supervised fine-tuning.

All families of token models share this loss. Must not know data sources, optimizers or FSDP.
"""

from __future__ import annotations

from fullshard.text.next_token import NextToken


class CausalLM(NextToken):
    """Cross-entropy of the next token; `labels[i]` is the target of position i."""


__all__ = ["CausalLM"]
