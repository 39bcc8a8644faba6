"""From sources to samples: encode once, keep some records for validation, pack.

Runs before any collective, and gives the same result on every rank. Must not know ranks, batches or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.data.base import Encoder, Record, Records, Samples, Source
from fullshard.data.encode import chat, text
from fullshard.data.order import HOLDOUT, generator
from fullshard.data.pack import Fitted, Plain, Wrapped
from fullshard.data.records import origins
from fullshard.data.store import Store, encoded
from fullshard.errors import DataError

_WHOLE = 2**31 - 1
"""A length that cuts nothing: documents that may be cut anywhere are stored whole and cut by the packer."""


@dataclass(frozen=True)
class Prepared:
    """What a run learns from and is validated on."""

    train: Samples
    validation: Samples | None
    encoder: Encoder
    report: list[str]
    """What was done, a line each."""


def choose_encoder(record: Record) -> Encoder:
    """The encoder whose form a record has."""
    is_text, is_chat = text.Text.accepts(record), chat.Chat.accepts(record)
    if is_text != is_chat:
        return text.Text() if is_text else chat.Chat()
    problem = "the record has both a text and a conversation" if is_text else "the record has no form that is known"
    raise DataError(
        f"{problem}. Keys found: {', '.join(map(repr, record)) or 'none'}. Accepted: {text.FORMS}; {chat.FORMS}. "
        "Choose with data.encode: text or chat, and name other columns there."
    )


def texts(source: Source, encode: Encoder | None, *, limit: int | None = None) -> Iterator[str]:
    """The plain text of a source's records, for training a tokenizer."""
    records = source.open()
    encoder = encode or _choose(records)
    for index in islice(range(len(records)), limit):
        try:
            yield from encoder.texts(records[index])
        except DataError as error:
            raise DataError(f"{records.where(index)}: {error}") from error


def prepare(
    *,
    train: Source,
    validation: Source | None,
    encode: Encoder | None,
    processor: Any,
    length: int,
    pack: bool,
    holdout: float,
    seed: int,
    cache: Path,
    say: Callable[[str], None],
) -> Prepared:
    """Encoded, split and packed samples, and what was done to get them."""
    records = train.open()
    encoder = encode or _choose(records)
    stored = length if not (pack and encoder.divisible) else _WHOLE
    store = encoded(records, encoder, processor, length=stored, cache=cache, say=say)
    report = [f"encoder: {encoder.kind()}{'' if encode else ' (chosen by the keys of the first record)'}"]
    report += _account("data", records, store)
    chosen = np.arange(len(store))
    held: Samples | None = None
    if validation is not None:
        other = validation.open()
        other_store = encoded(other, encoder, processor, length=stored, cache=cache, say=say)
        report += _account("validation data", other, other_store)
        held = _samples("validation", other_store, np.arange(len(other_store)), encoder, length, pack, report)
    elif holdout > 0:
        kept, chosen = _split(records, store, share=holdout, seed=seed)
        held = _samples("validation", store, kept, encoder, length, pack, report)
    trained = _samples("train", store, chosen, encoder, length, pack, report)
    return Prepared(train=trained, validation=held, encoder=encoder, report=report)


def _choose(records: Records) -> Encoder:
    try:
        return choose_encoder(records[0])
    except DataError as error:
        raise DataError(f"{records.where(0)}: {error}") from error


def held_out(num_records: int, *, share: float, seed: int) -> np.ndarray:
    """Which records are kept for validation: a boolean for each, drawn by the seed alone."""
    count = max(round(share * num_records), 1)
    if num_records - count < 1:
        raise DataError(
            f"data.holdout = {share:g} needs at least 2 different records, found {num_records}. Give data.validation, "
            "or set data.holdout to 0 to train without validation."
        )
    chosen = np.zeros(num_records, dtype=bool)
    chosen[generator(seed, stream=HOLDOUT).permutation(num_records)[:count]] = True
    return chosen


def _split(records: Records, store: Store, *, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample indices for validation and for training; a record that a mixture repeats is validated on once."""
    stored, first, origin = np.unique(origins(records), return_index=True, return_inverse=True)
    kept = held_out(len(stored), share=share, seed=seed)
    is_first = np.zeros(len(records), dtype=bool)
    is_first[first] = True
    apart = kept[origin]
    return np.flatnonzero((apart & is_first)[store.records]), np.flatnonzero(~apart[store.records])


def _samples(
    name: str, store: Store, chosen: np.ndarray, encoder: Encoder, length: int, pack: bool, report: list[str]
) -> Samples:
    if not len(chosen):
        raise DataError(
            f"data.{name}: no sample is left of {store.counts.records:,} records; {store.counts.dropped:,} had nothing "
            "to learn (no text, or no answer within data.sequence_length). Give more data or a longer sequence_length."
        )
    packable = set(store.names) == {"input_ids", "labels"}
    if pack and not packable:
        report.append(f"{name}: not packed, the encoder gives more than tokens ({', '.join(store.names)})")
    samples: Samples
    if pack and packable:
        samples = (Wrapped if encoder.divisible else Fitted)(store, chosen, length=length)
        filled = samples.num_tokens / (len(samples) * length)
        rows = f"packed into {len(samples):,} rows of {length:,} ({filled:.1%} filled)"
    else:
        samples = Plain(store, chosen)
        rows = "not packed"
    num_records = len(np.unique(store.records[chosen]))
    report.append(f"{name}: {num_records:,} records, {len(chosen):,} samples, {samples.num_tokens:,} tokens, {rows}")
    return samples


def _account(name: str, records: Records, store: Store) -> list[str]:
    counts = store.counts
    lines = [*getattr(records, "notes", [])]
    lines.append(f"{name}: {counts.records:,} records gave {counts.samples:,} samples")
    if counts.truncated:
        lines.append(f"{name}: {counts.truncated:,} samples were cut at the sequence length")
    if counts.dropped:
        lines.append(f"{name}: {counts.dropped:,} samples were dropped, they hold nothing to learn")
    return lines
