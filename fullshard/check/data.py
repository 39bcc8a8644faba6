"""Section 4 of a check: the data of a run, and what in it looks like a mistake.

Lengths and counts are exact. Contents are read up to a fixed number of samples, so that any data set is checked
quickly. Must not know models or ranks beyond their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import takewhile
from statistics import fmean
from typing import Any

import numpy as np

from fullshard.check.findings import Finding, ok, warning
from fullshard.contracts.data import IGNORE
from fullshard.data.loader import Batch, Loader
from fullshard.data.pack import Samples
from fullshard.data.prepare import Prepared, Stored, reasons, remarks
from fullshard.data.records import origins
from fullshard.data.store import Store
from fullshard.faults.fit import longest
from fullshard.formatting.plural import counted
from fullshard.multimodal.balance import balanced
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs

MOST_MASKED = 0.95
"""Share of positions without a loss term; more is a warning, as with the others."""
MOST_CUT = 0.1
"""Share of samples cut at the sequence length."""
MOST_DROPPED = 0.01
"""Share of samples from which nothing can be learned."""
MOST_HELD = 0.5
"""Share of the training records kept for validation."""
MOST_LEAKED = 0.001
"""Share of validation samples that are trained on too."""
MOST_REPEATED = 0.05
"""Share of training samples that repeat another one."""
MOST_READ = 20_000
"""Samples of train and of validation whose content is read, evenly spread."""
MOST_TOKENS = 20_000_000
"""Tokens of each that are read."""


def look(recipe: Recipe, inputs: RunInputs) -> Iterator[Finding]:
    """The findings about the data of a run."""
    data = inputs.data
    yield from _encoder(data)
    yield _counts("train", data.train, data.train_from)
    yield from _losses("data.train", data.train_from.store)
    yield from _unrendered("data.train", data.train_from.store)
    yield from _validation(recipe, inputs)
    yield from _batches(recipe, inputs)
    read = _read(data.train_from)
    yield from _masked(data.train_from, read)
    yield from _repeated(data.train_from, read)
    if data.validation_from is not None:
        yield from _leaked(data.train_from, data.validation_from, read)


def longest_batch(data: Prepared, *, per_device: int) -> Batch:
    """The largest micro-batch of a run: the longest rows together, on the CPU."""
    return Loader(data.train, data.collator, per_device=1).batch_of(longest(data.train.lengths, per_device))


def _encoder(data: Prepared) -> Iterator[Finding]:
    """The encoder, its layout, and notes of the source."""
    for line in takewhile(lambda line: not line.startswith("data: "), data.report):
        name, _, rest = line.partition(": ")
        yield (
            ok(name, rest) if name in ("encoder", "chat template", "prompts", "columns", "mode") else ok("source", line)
        )


def _counts(name: str, samples: Samples, stored: Stored) -> Finding:
    records = len(np.unique(stored.store.records[stored.chosen]))
    counts = [(records, "record"), (len(stored.chosen), "sample"), (samples.num_tokens, "token")]
    text = ", ".join(counted(*pair) for pair in counts)
    if samples.fixed_length is not None:
        filled = samples.num_tokens / (len(samples) * samples.fixed_length)
        text += f", in {counted(len(samples), 'row')} of {samples.fixed_length:,} ({filled:.1%} filled)"
    return ok(name, text)


def _losses(key: str, store: Store) -> Iterator[Finding]:
    """Samples that were truncated, and those that were dropped."""
    counts = store.counts
    all_samples = counts.samples + counts.dropped
    cut, dropped = counts.truncated / max(all_samples, 1), counts.dropped / max(all_samples, 1)
    text = f"{counts.truncated:,} of {counted(all_samples, 'sample')} ({cut:.1%}) of {key} are too long"
    if cut > MOST_CUT:
        problem = f"{text} and were truncated; more than {MOST_CUT:.0%} is worth a look."
        yield warning("truncated", problem, "Raise data.sequence_length, or split the records.")
    elif counts.truncated:
        yield ok("truncated", f"{text} and were truncated")
    if dropped > MOST_DROPPED:
        advice = "; ".join(counts.fixes.values())
        problem = f"{counts.dropped:,} of {counted(all_samples, 'sample')} ({dropped:.1%}) of {key} are left out: "
        problem += f"{reasons(counts)}."
        yield warning("dropped", problem, f"{advice[:1].upper()}{advice[1:]}.")
    elif counts.dropped:
        yield ok("dropped", f"{counts.dropped:,} of {counted(all_samples, 'sample')} of {key}: {reasons(counts)}")
    elif not counts.truncated:
        yield ok("truncated", f"no sample of {key} was truncated or left out")


def _unrendered(key: str, store: Store) -> Iterator[Finding]:
    """Parts of records that no sample contains."""
    for line in remarks(store.counts.lost):
        remedy = "Use a tokenizer whose chat template renders them, or remove them from the records."
        yield warning("unrendered", f"{key}: {line}. The model never sees them.", remedy)
    for line in remarks(store.counts.noted):
        yield ok("rendered", f"{key}: {line}")


def _validation(recipe: Recipe, inputs: RunInputs) -> Iterator[Finding]:
    data = inputs.data
    if data.validation is None or data.validation_from is None:
        yield ok("validation", "none: no data.validation, and data.holdout = 0")
        return
    found = _counts("validation", data.validation, data.validation_from)
    batch = inputs.validation_per_device * inputs.plan.world
    small = f"; less than one batch of {batch:,}" if len(data.validation) < batch else ""
    yield ok("validation", f"{found.text}{small}")
    if recipe.data.validation is None and recipe.data.holdout > MOST_HELD:
        text = f"data.holdout = {recipe.data.holdout:g} keeps {recipe.data.holdout:.0%} of data.train for validation "
        text += f"and leaves {counted(len(data.train_from.chosen), 'sample')} to train on; 0.05 is usual."
        yield warning("validation", text, "Lower data.holdout, or give data.validation.")
    if data.validation_from.store is not data.train_from.store:
        yield from _losses("data.validation", data.validation_from.store)
        yield from _unrendered("data.validation", data.validation_from.store)


def _batches(recipe: Recipe, inputs: RunInputs) -> Iterator[Finding]:
    """The first and the longest batch."""
    data, plan = inputs.data, inputs.plan
    balance = balanced(recipe.data.balance, data, per_device=plan.per_device, world=plan.world)
    loader = Loader(
        data.train,
        data.collator,
        per_device=plan.per_device,
        global_size=plan.global_size,
        seed=recipe.seed,
        shuffle=recipe.data.shuffle,
        world=plan.world,
        **balance,
    )
    first = loader.first_batch()
    yield ok("first batch", _shapes(first))
    batch = longest_batch(data, per_device=plan.per_device)
    top = int(data.train.lengths.max())
    yield ok("longest batch", f"{_shapes(batch)}; the longest {plan.noun} has {counted(top, 'token')}")
    first_steps = [balance["numbers"](loader.rows(step)[1]) for step in range(min(loader.steps_per_epoch, 100))]
    if data.train.fixed_length is None and plan.per_device > 1 and "padding" in first_steps[0]:
        padding = fmean(numbers["padding"] for numbers in first_steps)
        packable = not recipe.data.pack and data.encoder.settings.can_pack(data.train_from.store)
        hint = "; data.pack=true would fill the rows" if packable and padding > 0.1 else ""
        yield ok("padding", f"about {padding:.0%} of a batch{hint}")


def _shapes(batch: Batch) -> str:
    sizes = {name: " x ".join(map(str, value.shape)) for name, value in batch.items() if hasattr(value, "shape")}
    shown = {name: shape for name, shape in sizes.items() if name not in ("sample_ids", "bounds", "draws")}
    groups: dict[str, list[str]] = {}
    for name, shape in shown.items():
        groups.setdefault(shape, []).append(name)
    return "; ".join(f"{', '.join(names)} {shape}" for shape, names in groups.items())


class _Read:
    """Hashes of some samples, and their number of positions with and without a loss term."""

    def __init__(self, stored: Stored, indices: np.ndarray) -> None:
        self.indices = indices
        """Indices in the store."""
        self.hashes: list[bytes] = []
        self.positions = self.masked = 0
        for index in indices:
            features = stored.store[int(index)]
            labels: Any = features.pop("labels", None)
            digest = hashlib.blake2b(digest_size=16)
            for values in features.values():
                digest.update(values.tobytes())
            self.hashes.append(digest.digest())
            if labels is not None:
                self.positions += labels.size
                self.masked += int((labels == IGNORE).sum())


def _read(stored: Stored) -> _Read:
    """Reads all samples, or as many as the limits allow, evenly spread; records that a mixture repeats only once."""
    indices = _once(stored)
    tokens = int(stored.store.lengths[indices].sum())
    number = min(len(indices), MOST_READ, max(len(indices) * MOST_TOKENS // max(tokens, 1), 1))
    return _Read(stored, indices[np.linspace(0, len(indices) - 1, number).round().astype(np.int64)])


def _once(stored: Stored) -> np.ndarray:
    _, first = np.unique(origins(stored.records), return_index=True)
    is_first = np.zeros(len(stored.records), dtype=bool)
    is_first[first] = True
    once: np.ndarray = stored.chosen[is_first[stored.store.records[stored.chosen]]]
    return once


def _compared(read: _Read, stored: Stored) -> str:
    """The number of samples that were read."""
    number, whole = len(read.indices), len(_once(stored))
    return counted(number, "sample") + ("" if number == whole else f" drawn evenly from {whole:,}")


def _masked(stored: Stored, read: _Read) -> Iterator[Finding]:
    if not read.positions:
        return
    share = read.masked / read.positions
    text = f"{share:.1%} of positions have no loss term ({_compared(read, stored)})"
    if share > MOST_MASKED:
        problem = f"data.train: {text}; above {MOST_MASKED:.0%} nearly all computation is wasted."
        remedy = "Shorten the questions, or learn every token with data.encode={kind: chat, train_on: all}."
        yield warning("masked labels", problem, remedy)
    else:
        yield ok("masked labels", text)


def _repeated(stored: Stored, read: _Read) -> Iterator[Finding]:
    first: dict[bytes, int] = {}
    again: list[tuple[int, int]] = []
    for index, digest in zip(read.indices, read.hashes, strict=True):
        if digest in first:
            again.append((int(index), first[digest]))
        else:
            first[digest] = int(index)
    share = len(again) / len(read.indices)
    text = f"{len(again):,} ({share:.1%}) of {_compared(read, stored)} repeat another one"
    if share > MOST_REPEATED:
        remedy = "Remove repeated records; to weight data on purpose use a mixture: data.train={kind: mixture, ...}."
        yield warning("duplicates", f"data.train: {text}, such as {_examples(stored, stored, again)}.", remedy)
    else:
        yield ok("duplicates", text if again else f"none among {_compared(read, stored)} of train")


def _leaked(train: Stored, validation: Stored, read: _Read) -> Iterator[Finding]:
    held = _read(validation)
    trained = dict(zip(reversed(read.hashes), reversed(read.indices), strict=True))
    both = [(int(i), int(trained[h])) for i, h in zip(held.indices, held.hashes, strict=True) if h in trained]
    share = len(both) / len(held.indices)
    text = (
        f"{len(both):,} ({share:.1%}) of {_compared(held, validation)} of validation are among "
        f"{_compared(read, train)} of train"
    )
    if share > MOST_LEAKED:
        problem = f"{text}, such as {_examples(validation, train, both)}: the validation loss will look too good."
        remedy = "Remove them from data.train or data.validation; without data.validation, remove repeated records."
        yield warning("leakage", problem, remedy)
    else:
        yield ok("leakage", text)


def _examples(one: Stored, other: Stored, pairs: Sequence[tuple[int, int]]) -> str:
    named = [
        f"{one.records.where(int(one.store.records[a]))} = {other.records.where(int(other.store.records[b]))}"
        for a, b in pairs[:3]
    ]
    return ", ".join(named)
