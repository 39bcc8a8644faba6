"""Whether the tokenizer fits the model and the data: ids, special tokens, and whether text survives a round trip.

Must not know how tokenizers are loaded, files or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fullshard.check.findings import Finding, error, ok, warning
from fullshard.contracts.data import OpenEncoder
from fullshard.data.pack import Samples
from fullshard.formatting.plural import counted

SCRIPTS = "Grüße, señor! Привет, мир. 你好，世界。こんにちは 안녕 नमस्ते مرحبا שלום 🙂 x = 3.14"
"""One line in many scripts; the same in every Unicode normal form that tokenizers use, except the full-width marks."""
MOST_UNKNOWN = 0.01
BETTER = "Use the model's own tokenizer, or train a byte-level one: model.tokenizer={train: {vocab_size: 8192}}."
OWN = "Use the model's own tokenizer, or one whose ids have no gaps."
_MOST_ROWS = 20_000


def look(
    tokenizer: Any,
    *,
    rows: int,
    texts: Sequence[str],
    config: Mapping[str, Any],
    writes: bool = True,
    stored: int | None = None,
) -> Iterator[Finding]:
    """The embedding has `rows`, and had `stored` before it was resized; `texts` are some of the data. A model that
    generates no text (`writes` is false) needs no end token, and may be case-insensitive."""
    yield from vocabulary(tokenizer, rows=rows, stored=stored)
    if writes:
        yield from special_tokens(tokenizer, rows=rows, config=config)
        yield from round_trip(tokenizer, texts)
    yield from unknown_tokens(tokenizer, texts)


def vocabulary(tokenizer: Any, *, rows: int, stored: int | None = None) -> Iterator[Finding]:
    """Every id needs a row in the embedding."""
    ids = tokenizer.get_vocab().values()
    highest, tokens = max(ids, default=-1), len(tokenizer)
    if highest >= rows:
        text = f"model.tokenizer has ids up to {highest:,}, but the embedding has {rows:,} rows: the first text with "
        text += "a higher id would crash the run."
        yield error("vocabulary", text, OWN)
    else:
        left = f" ({rows - tokens:,} rows unused)" if rows > tokens else ""
        left += f", resized from {stored:,}" if stored not in (None, rows) else ""
        yield ok("vocabulary", f"{tokens:,} tokens, {rows:,} embedding rows{left}")


def special_tokens(tokenizer: Any, *, rows: int, config: Mapping[str, Any]) -> Iterator[Finding]:
    """An end token is required; a padding token is not."""
    ids = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")}
    beyond = {name: value for name, value in ids.items() if value is not None and value >= rows}
    if beyond:
        text = f"model.tokenizer: {_named(beyond)} outside the embedding of {rows:,} rows."
        yield error("special tokens", text, OWN)
    if ids["eos"] is None:
        text = "model.tokenizer has no end token (eos_token): documents run into each other, and the model never "
        text += "learns to stop."
        yield warning("special tokens", text, 'Set "eos_token" in its tokenizer_config.json.')
    strange = {}
    for name in ("bos", "eos", "pad"):
        value = config.get(f"{name}_token_id")
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int) and one >= rows:
                strange[name] = one
    if strange:
        text = f"config.json: {_named(strange)} outside the embedding of {rows:,} rows; generation would not stop."
        remedy = "Fix the ids in config.json, or set them: model.overrides.eos_token_id=..."
        yield warning("special tokens", text, remedy)
    if not beyond and not strange and ids["eos"] is not None:
        yield ok("special tokens", _described(tokenizer, ids))


def _described(tokenizer: Any, ids: dict[str, int | None]) -> str:
    text = f"ends with {tokenizer.eos_token} ({ids['eos']})"
    if ids["pad"] is None:
        return f"{text}; no padding token, which is fine"
    if ids["pad"] == ids["eos"]:
        return f"{text}, which is also the padding token: padding is masked by position, so the end is still learned"
    return text


def _named(ids: dict[str, int]) -> str:
    found = [f"{name}_token_id = {value:,}" for name, value in ids.items()]
    return f"{' and '.join(found)} {'is' if len(found) == 1 else 'are'}"


def round_trip(tokenizer: Any, texts: Sequence[str]) -> Iterator[Finding]:
    """Encoding and decoding must give the text back, up to surrounding white space."""
    lost = [(text, back) for text in texts if (back := _there_and_back(tokenizer, text)).strip() != text.strip()]
    if lost:
        before, after = _difference(*lost[0])
        changes = f"{len(lost)} of {len(texts)} sample texts: {before!r} comes back as {after!r}"
        yield warning("round trip", f"model.tokenizer changes {changes}. The model cannot learn what is lost.", BETTER)
        return
    given = f"{len(texts)} sample texts survive exactly" if texts else "no text in the data"
    if _there_and_back(tokenizer, SCRIPTS).strip() == SCRIPTS:
        yield ok("round trip", f"{given}, and so do other scripts")
    else:
        before, after = _difference(SCRIPTS, _there_and_back(tokenizer, SCRIPTS))
        yield ok("round trip", f"{given}; other scripts do not ({before!r} becomes {after!r})")


def _there_and_back(tokenizer: Any, text: str) -> str:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _difference(before: str, after: str, *, width: int = 24) -> tuple[str, str]:
    """Both texts around the first difference."""
    before, after = before.strip(), after.strip()
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    start = max(at - width // 3, 0)
    return before[start : start + width], after[start : start + width]


def unknown_tokens(tokenizer: Any, texts: Sequence[str]) -> Iterator[Finding]:
    """The share of the data that the tokenizer has no token for."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None or not texts:
        return
    total, found, example = 0, 0, ""
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        total, here = total + len(ids), ids.count(unknown)
        found, example = found + here, example or (text.strip()[:40] if here else "")
    if total and found / total > MOST_UNKNOWN:
        some = f"{found / total:.1%} of the sample texts (such as {example!r}), allowed {MOST_UNKNOWN:.0%}"
        problem = f"model.tokenizer has no token for {some}: they all become {tokenizer.unk_token}."
        yield warning("unknown tokens", problem, BETTER)


def chat_template(encoder: OpenEncoder) -> Iterator[Finding]:
    """The layout of conversations."""
    if (words := encoder.chat_template()) is not None:
        yield ok("chat template", words)


def token_ids(samples: Samples, *, rows: int, noun: str = "sample") -> Iterator[Finding]:
    """In data that was tokenised elsewhere, every id needs a row in the embedding."""
    chosen = np.unique(np.linspace(0, len(samples) - 1, min(len(samples), _MOST_ROWS)).astype(int))
    found = [samples[int(index)].get("input_ids") for index in chosen]
    highest = max((int(ids.max()) for ids in found if ids is not None and len(ids)), default=None)
    if highest is None:
        return
    if highest >= rows:
        text = f"data.train contains the token {highest:,}, but the embedding has {rows:,} rows, for 0 to {rows - 1:,}."
        remedy = f"Tokenise with the model's own tokenizer; from scratch, set model.overrides.vocab_size={highest + 1}."
        yield error("vocabulary", text, remedy)
    else:
        read = counted(len(chosen), noun)
        yield ok("vocabulary", f"tokens up to {highest:,} in {read}, {rows:,} embedding rows")
