"""From open sources to samples: encodes once, holds out validation records, packs.

Runs before any collective, with the same result on every rank. Must not know ranks, batches or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.config.part import kinds, part_class
from fullshard.contracts.data import Collator, Encoder, OpenEncoder, Quantity, Record, Records
from fullshard.data.order import HOLDOUT, generator
from fullshard.data.pack import Fitted, Plain, Samples, Wrapped
from fullshard.data.records import keys_found, named, origins
from fullshard.data.store import Counts, Store, encoded
from fullshard.errors import DataError
from fullshard.formatting.plural import counted, join_words, were

_WHOLE = 2**31 - 1
"""Cuts nothing: divisible samples are stored whole, and packing cuts them."""


@dataclass(frozen=True)
class Stored:
    """Samples chosen from a store, and the records they were made from."""

    records: Records
    store: Store
    chosen: np.ndarray
    encoder: Encoder
    """The settings they were made with."""


@dataclass(frozen=True)
class Prepared:
    """The data of a run."""

    train: Samples
    validation: Samples | None
    encoder: OpenEncoder
    collator: Collator
    report: list[str]
    """What was done, in lines."""
    train_from: Stored
    validation_from: Stored | None
    quantities: Sequence[Quantity] = ()
    """What speed is logged in, with the amount in each row of `train`."""


def choose_encoder(record: Record) -> Encoder:
    """The one encoder, built-in or installed, that accepts a record."""
    known = [part_class(Encoder, kind, where="data.encode") for kind in kinds(Encoder)]
    accepting = [cls for cls in known if cls.accepts(record)]
    chosen = [cls for cls in accepting if not cls.last_resort] or accepting
    if len(chosen) == 1:
        return chosen[0]()
    problem = "the record has no known form"
    if chosen:
        problem = f"the record has the form of several encoders: {join_words(cls.kind() for cls in chosen)}"
    with_forms = [cls for cls in known if cls.forms]
    raise DataError(
        f"{problem}. {keys_found(record)} Accepted: {'; '.join(cls.forms for cls in with_forms)}. Choose "
        f"with data.encode: {join_words((cls.kind() for cls in with_forms), 'or')}, and name other columns there."
    )


def texts(records: Records, encoder: Encoder | None, *, limit: int | None = None) -> Iterator[str]:
    """The plain text of records, for training a tokenizer."""
    encoder = encoder or encoder_for(records)
    for index in islice(range(len(records)), limit):
        record = records[index]  # outside of `named`: a source's own errors name the location
        with named(records, index, record):
            found = encoder.texts(record)
            for text in found:
                text.encode()
        yield from found


def prepare(
    *,
    train: Records,
    validation: Records | None,
    encode: Encoder | None,
    processor: Any,
    length: int,
    pack: bool,
    holdout: float,
    seed: int,
    cache: Path,
    say: Callable[[str], None],
) -> Prepared:
    """Encodes, splits and packs; reports what was done."""
    settings = encode or encoder_for(train)
    encoder = settings.open(processor, length=_WHOLE if pack and settings.divisible else length)
    store = encoded(train, encoder, cache=cache, say=say)
    _require_samples("data.train", store)
    collator = encoder.collator(store)
    report = [f"encoder: {settings.kind()}{'' if encode else ' (chosen by the keys of the first record)'}"]
    report += [*encoder.notes(), *collator.notes, *settings.columns_read(train[0]), *_account("data", train, store)]
    chosen = np.arange(len(store))
    held_from: Stored | None = None
    if validation is not None:
        other = encoded(validation, encoder, cache=cache, say=say)
        report += _account("validation data", validation, other)
        _require_samples("data.validation", other)
        held_from = Stored(validation, other, np.arange(len(other)), settings)
    elif holdout > 0:
        kept, chosen = _split(train, store, share=holdout, seed=seed)
        if not len(kept) or not len(chosen):
            raise DataError(
                f"data.holdout = {holdout:g} leaves no sample for {'training' if len(kept) else 'validation'}: the "
                f"{counted(store.counts.records, 'record')} of data.train gave only "
                f"{counted(store.counts.samples, 'sample')}; {reasons(store.counts)}. Give more data, or "
                "data.validation, or set data.holdout to 0 to train without validation."
            )
        held_from = Stored(train, store, kept, settings)
    train_from = Stored(train, store, chosen, settings)
    held = _samples("validation", held_from, encoder, length, pack, report) if held_from else None
    trained = _samples("train", train_from, encoder, length, pack, report)
    encoder.close()
    per_row = [replace(each, amounts=trained.per_row(each.amounts)) for each in settings.quantities(store)]
    return Prepared(trained, held, encoder, collator, report, train_from, held_from, per_row)


def encoder_for(records: Records) -> Encoder:
    """The encoder for a source, by its first record."""
    record = records[0]
    with named(records, 0, record):
        return choose_encoder(record)


def held_out(num_records: int, *, share: float, seed: int) -> np.ndarray:
    """Which records are held out for validation, as booleans; depends on the seed alone."""
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


def _samples(name: str, stored: Stored, encoder: OpenEncoder, length: int, pack: bool, report: list[str]) -> Samples:
    store, chosen, settings = stored.store, stored.chosen, stored.encoder
    samples: Samples
    if pack and settings.can_pack(store):
        samples = (Wrapped if settings.divisible else Fitted)(store, chosen, length=length)
        filled = samples.num_tokens / (len(samples) * length)
        rows = f"packed into {counted(len(samples), 'row')} of {length:,} ({filled:.1%} filled)"
    else:
        if pack and not settings.lays_out:
            report.append(f"{name}: not packed, the encoder gives more than tokens ({', '.join(store.names)})")
        samples, rows = Plain(store, chosen), encoder.contents(store, chosen)
    counts = [(len(np.unique(store.records[chosen])), "record"), (len(chosen), "sample")]
    of_tokens = any(each.name == "tokens" for each in settings.quantities(store))
    counts += [(samples.num_tokens, "token")] if of_tokens else []
    report.append(f"{name}: {', '.join(counted(*count) for count in counts)}, {rows}")
    return samples


def _account(name: str, records: Records, store: Store) -> list[str]:
    counts = store.counts
    lines = [*getattr(records, "notes", [])]
    lines.append(f"{name}: {counted(counts.records, 'record')} gave {counted(counts.samples, 'sample')}")
    if counts.truncated:
        lines.append(
            f"{name}: {counted(counts.truncated, 'sample')} {were(counts.truncated)} cut at the sequence length"
        )
    if counts.dropped:
        lines.append(f"{name}: {counted(counts.dropped, 'sample')} {were(counts.dropped)} dropped; {reasons(counts)}")
    lines += [f"{name}: {line}" for line in remarks(counts.noted)]
    return lines


def remarks(counts: Mapping[str, int]) -> list[str]:
    """`12 records have ...`, for each remark of an encoder."""
    return [f"{counted(number, 'record')} {'has' if number == 1 else 'have'} {what}" for what, number in counts.items()]


def reasons(counts: Counts) -> str:
    """Why samples were dropped, and how many for each reason."""
    return ", ".join(f"{number:,} {why}" for why, number in counts.drop_reasons.items()) or "none was dropped"


def _require_samples(key: str, store: Store) -> None:
    if not len(store):
        raise DataError(
            f"{key}: no sample is left of {counted(store.counts.records, 'record')}: {reasons(store.counts)}. "
            f"To fix it: {'; '.join(store.counts.fixes.values())}."
        )
