"""Gemma 3n without timm: its vision tower, which audio never reaches, is a stand-in, registered as Transformers' own
classes are."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModel, Gemma3nVisionConfig, PreTrainedModel

from tests.small import train


class StandIn(PreTrainedModel):
    """A vision tower that is never run."""

    config_class = Gemma3nVisionConfig

    def __init__(self, config: Gemma3nVisionConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(4, config.hidden_size)
        self.post_init()


AutoModel.register(Gemma3nVisionConfig, StandIn, exist_ok=True)


def train_gemma(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank of a run, in a process that knows the stand-in."""
    return train(settings)
