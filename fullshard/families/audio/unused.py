"""Parameters that audio never reaches, such as the vision tower of a model that reads images as well.

Found by trying: a tiny model of the same architecture runs one clip forward and backward. Must not know ranks.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from fullshard.families.audio.fresh_processor import SETTINGS, fit_tokens, fresh_processor
from fullshard.families.audio.sizes import tiny_audio


def unused(config: Any, names: list[str]) -> list[str]:
    """Which of these parameters get no gradient; none where the architecture cannot be tried."""
    import torch

    if config.model_type not in SETTINGS or config.is_encoder_decoder:
        return []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        reached = _reached(config.model_type)
    return [name for name in names if _without_number(name) not in reached]


@functools.cache
def _reached(kind: str) -> set[str]:
    """The parameters of a small model that get a gradient from one clip and one word, or are always frozen."""
    import numpy as np
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedTokenizerFast

    config: Any = CONFIG_MAPPING[kind](**tiny_audio(CONFIG_MAPPING[kind]()))
    words = Tokenizer(WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<unk>")
    processor = fresh_processor(config, tokenizer)
    config.get_text_config(decoder=True).vocab_size = len(tokenizer)
    fit_tokens(config, processor)
    model = AutoModelForMultimodalLM.from_config(config)
    samples = processor.rate
    ids = tokenizer([processor.clip_text(samples) + "word"], add_special_tokens=False, return_tensors="pt")["input_ids"]
    clip = np.zeros(samples, dtype=np.float32)
    model(input_ids=ids, use_cache=False, **processor.features([clip])).logits.sum().backward()
    return {_without_number(name) for name, p in model.named_parameters() if p.grad is not None or not p.requires_grad}


def _without_number(name: str) -> str:
    """A name that is the same for every block: models differ in how many they have."""
    return re.sub(r"\.\d+\.", ".0.", name)


__all__ = ["unused"]
