"""Turns an encoder architecture into a decoder if its config allows that, so that it cannot see what it predicts.

BERT and its relatives look both ways unless `is_decoder` is set. A tiny probe shows whether they do. Must not know
weights, objectives or ranks.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from fullshard.hf.architecture.sizes import config_with, tiny_keys

logger = logging.getLogger(__name__)


def make_decoder(config: Any, *, trust_remote_code: bool) -> None:
    """Sets `is_decoder` in the config of a causal language model that would look ahead without it, and says so."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_decoder", None) is False and _looks_ahead(config, trust_remote_code=trust_remote_code):
        text.is_decoder = True
        logger.warning(
            "model: is_decoder = true is set in the config of %s, which would otherwise see the tokens it has to "
            "predict; the exported config has it too",
            config.model_type,
        )


@torch.no_grad()
def _looks_ahead(config: Any, *, trust_remote_code: bool) -> bool:
    """Whether in a small model of this config a later token changes an earlier one's logits."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(16).mul(7).remainder(97).add(3)[None]
    other = ids.clone()
    other[:, 9:] += 50
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            small = config_with(type(config), tiny_keys(config))
            probe = AutoModelForCausalLM.from_config(small, trust_remote_code=trust_remote_code).eval()
            one, two = (probe(input_ids=row, use_cache=False).logits[:, :9] for row in (ids, other))
        except Exception:
            return True  # some refuse to be built without it; the proof before step 1 decides
    return not torch.allclose(one, two, rtol=0.0, atol=1e-5 * float(one.abs().max()))
