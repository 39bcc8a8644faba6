"""Small real tokenizers, trained on a few sentences."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CORPUS = [
    "the quick brown fox jumps over the lazy dog and asks who are you",
    "User: hello there\nAssistant: fine, thanks\n",
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(*, eos: str | None = "<eos>", bos: str | None = None, chat_template: str | None = None) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token in (eos, bos, "<|im_start|>", "<|im_end|>") if token]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    wrapped.chat_template = chat_template
    return wrapped


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def chatml() -> Any:
    return make_tokenizer(chat_template=CHATML)


@pytest.fixture(scope="session")
def tokenizer_with() -> Callable[..., Any]:
    return make_tokenizer
