"""Which dropout is active, as the run header shows it."""

from __future__ import annotations

from torch import nn

from fullshard.setup.run_summary import active_dropout, dropout_layers
from tests.unit.hf.architectures import build


def test_dropout_layers_and_probabilities_kept_as_numbers_are_found() -> None:
    assert set(active_dropout(build("gpt2")).values()) == {0.1}
    assert active_dropout(build("gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)) == {}
    assert active_dropout(build("llama")) == {}
    # Attention keeps its share as a number, for a function.
    with_number = build("llama", attention_dropout=0.25)
    assert dropout_layers(with_number) == {}
    assert set(active_dropout(with_number).values()) == {0.25}


def test_layers_with_probability_zero_are_not_listed() -> None:
    assert dropout_layers(nn.Sequential(nn.Dropout(0.0), nn.Dropout2d(0.5))) == {"1": 0.5}
