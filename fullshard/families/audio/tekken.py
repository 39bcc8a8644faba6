"""The tokenizer of Mistral's models, which comes as tekken.json, and the layout of their conversations.

Transformers reads the file without mistral-common, but its templates are in that package. Must not know audio or ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fullshard.errors import RecipeError
from fullshard.families.audio.processor import because

FILE = "tekken.json"
TEMPLATE = (
    "{% macro said(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part['type'] == 'audio' %}{{ '[AUDIO]' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endmacro %}{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ said(message['content']) + eos_token }}{% endgeneration %}"
    "{% elif message['role'] == 'system' %}{{ '[SYSTEM_PROMPT]' + said(message['content']) + '[/SYSTEM_PROMPT]' }}"
    "{% else %}{{ '[INST]' + said(message['content']) + '[/INST]' }}{% endif %}{% endfor %}"
)


def has_tekken(folder: Path) -> bool:
    """Whether a folder has such a tokenizer and no other."""
    return (folder / FILE).is_file() and not (folder / "tokenizer.json").is_file()


def load_tekken(folder: Path, *, where: str) -> Any:
    """The tokenizer, with the chat template of Mistral's instruct models."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.mistral.tokenizer import MistralConverter

    try:
        converter = MistralConverter(str(folder / FILE))
        words = converter.converted()
    except Exception as error:  # of any kind
        raise RecipeError(f"{where}: {folder / FILE} cannot be loaded{because(error)}") from error
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    special = [str(token) for token in converter.additional_special_tokens]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


__all__ = ["has_tekken", "load_tekken"]
