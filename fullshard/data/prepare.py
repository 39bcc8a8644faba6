"""From sources to samples: encode once, keep some records for validation, pack.

Runs before any collective, and gives the same result on every rank. Must not know ranks, batches or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.config.part import kinds, part_class
from fullshard.contracts.data import Encoder, Record, Records, Samples, Source
from fullshard.data.order import HOLDOUT, generator
from fullshard.data.pack import Fitted, Plain, Wrapped
from fullshard.data.records import keys_found, named, origins
from fullshard.data.store import Counts, Store, encoded
from fullshard.errors import DataError
from fullshard.formatting.plural import counted, join_words, were

_WHOLE = 2**31 - 1
"""A length that cuts nothing: documents that may be cut anywhere are stored whole and cut by the packer."""


@dataclass(frozen=True)
class Stored:
    """What samples were made from: some entries of a store, and the records behind them."""

    records: Records
    store: Store
    chosen: np.ndarray
    encoder: Encoder
    """What made them."""


@dataclass(frozen=True)
class Prepared:
    """What a run learns from and is validated on."""

    train: Samples
    validation: Samples | None
    encoder: Encoder
    report: list[str]
    """What was done, a line each."""
    train_from: Stored
    validation_from: Stored | None


def choose_encoder(record: Record) -> Encoder:
    """The encoder whose form a record has."""
    known = [part_class(Encoder, kind, where="data.encode") for kind in kinds(Encoder)]
    accepting = [cls for cls in known if cls.accepts(record)]
    chosen = [cls for cls in accepting if not cls.last_resort] or accepting
    if len(chosen) == 1:
        return chosen[0]()
    several = f"the record has the form of several encoders: {join_words(cls.kind() for cls in chosen)}"
    with_forms = [cls for cls in known if cls.forms]
    raise DataError(
        f"{several if chosen else 'the record has no known form'}. {keys_found(record)} "
        f"Accepted: {'; '.join(cls.forms for cls in with_forms)}. "
        f"Choose with data.encode: {join_words((cls.kind() for cls in with_forms), 'or')}, and name other columns "
        "there."
    )


def texts(source: Source, encode: Encoder | None, *, limit: int | None = None) -> Iterator[str]:
    """The plain text of a source's records, for training a tokenizer."""
    records = source.open()
    encoder = encode or _choose(records)
    for index in islice(range(len(records)), limit):
        # Read before the try: what cannot be read is named with its place already.
        record = records[index]
        with named(records, index, record):
            found = encoder.texts(record)
            for text in found:
                text.encode()
        yield from found


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
    encoder.settle(store)
    report = [f"encoder: {encoder.kind()}{'' if encode else ' (chosen by the keys of the first record)'}"]
    report += encoder.notes(processor) + encoder.reads(records[0])
    report += _account("data", records, store)
    _check_any("data.train", store)
    chosen = np.arange(len(store))
    held: Samples | None = None
    held_from: Stored | None = None
    if validation is not None:
        other = validation.open()
        other_store = encoded(other, encoder, processor, length=stored, cache=cache, say=say)
        report += _account("validation data", other, other_store)
        _check_any("data.validation", other_store)
        held_from = Stored(other, other_store, np.arange(len(other_store)), encoder)
        held = _samples("validation", other_store, held_from.chosen, encoder, length, pack, report)
    elif holdout > 0:
        kept, chosen = _split(records, store, share=holdout, seed=seed)
        if not len(kept) or not len(chosen):
            raise DataError(
                f"data.holdout = {holdout:g} leaves no sample for {'training' if len(kept) else 'validation'}: the "
                f"{counted(store.counts.records, 'record')} of data.train gave only "
                f"{counted(store.counts.samples, 'sample')}; {reasons(store.counts)}. Give more data, or "
                "data.validation, or set data.holdout to 0 to train without validation."
            )
        held_from = Stored(records, store, kept, encoder)
        held = _samples("validation", store, kept, encoder, length, pack, report)
    trained = _samples("train", store, chosen, encoder, length, pack, report)
    encoder.close()
    return Prepared(
        train=trained,
        validation=held,
        encoder=encoder,
        report=report,
        train_from=Stored(records, store, chosen, encoder),
        validation_from=held_from,
    )


def _choose(records: Records) -> Encoder:
    record = records[0]
    with named(records, 0, record):
        return choose_encoder(record)


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
    packable = set(store.names) == {"input_ids", "labels"}
    if pack and not packable and not encoder.lays_out:
        report.append(f"{name}: not packed, the encoder gives more than tokens ({', '.join(store.names)})")
    samples: Samples
    if pack and packable:
        samples = (Wrapped if encoder.divisible else Fitted)(store, chosen, length=length)
        filled = samples.num_tokens / (len(samples) * length)
        rows = f"packed into {counted(len(samples), 'row')} of {length:,} ({filled:.1%} filled)"
    else:
        samples = Plain(store, chosen)
        rows = "not packed"
        if encoder.lays_out:
            rows = counted(int(store.sizes("lengths")[chosen].sum()), "text")
            if "image_sizes" in store.names:
                rows += f", {counted(int(store.sizes('image_sizes')[chosen].sum()), 'image')}"
    num_records = len(np.unique(store.records[chosen]))
    counts = [(num_records, "record"), (len(chosen), "sample")]
    counts += [(samples.num_tokens, "token")] if encoder.unit == "tokens" else []
    report.append(f"{name}: {', '.join(counted(*count) for count in counts)}, {rows}")
    return samples


def _account(name: str, records: Records, store: Store) -> list[str]:
    counts = store.counts
    lines = [*getattr(records, "notes", [])]
    lines.append(f"{name}: {counted(counts.records, 'record')} gave {counted(counts.samples, 'sample')}")
    if counts.truncated:
        lines.append(f"{name}: {_were(counts.truncated)} cut at the sequence length")
    if counts.dropped:
        why = "" if counts.unreadable else ", nothing to learn"
        lines.append(f"{name}: {_were(counts.dropped)} dropped{why}; {reasons(counts)}")
    lines += [f"{name}: {line}" for line in remarks(counts.noted)]
    return lines


def remarks(counts: Mapping[str, int]) -> list[str]:
    """`12 records have ...`, for each thing that an encoder said of records."""
    return [f"{counted(number, 'record')} {'has' if number == 1 else 'have'} {what}" for what, number in counts.items()]


def _were(number: int) -> str:
    return f"{counted(number, 'sample')} {were(number)}"


def reasons(counts: Counts) -> str:
    """Why samples were dropped, with how many for each reason."""
    reasons = [
        (counts.empty, "with no text"),
        (counts.masked, "with no answer or all labels masked"),
        (counts.beyond, "with all that is learned after data.sequence_length"),
        (counts.unreadable, "with an image that cannot be read"),
    ]
    return ", ".join(f"{number:,} {words}" for number, words in reasons if number) or "none was dropped"


def _check_any(key: str, store: Store) -> None:
    if len(store):
        return
    counts = store.counts
    remedies = [
        (counts.empty, "put text into the records"),
        (counts.masked, "give conversations an answer that is not blank, or labels that are not all -100"),
        (counts.beyond, "raise data.sequence_length"),
        (
            counts.unreadable,
            "give images that are there and whole; relative paths begin at data.encode.root (of pairs: "
            "data.encode.image_root), and data.encode.unreadable = error names the first that cannot be read",
        ),
    ]
    remedy = "; ".join(words for number, words in remedies if number)
    raise DataError(
        f"{key}: no sample is left of {counted(counts.records, 'record')}, nothing in them can be learned: "
        f"{reasons(counts)}. To fix it: {remedy}."
    )
