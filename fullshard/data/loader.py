"""The micro-batches of each step, made ahead of time by worker processes.

The number of a step determines its data, so there is no state to save. Must not know record formats, models or
torch.distributed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from fullshard.contracts.data import Collator, Features, Quantity
from fullshard.data.order import FILLER, FIXED, draws, permutation, rank_slices
from fullshard.data.pack import Samples
from fullshard.errors import DataError, FullshardError
from fullshard.faults.watch import kept_windows

Batch = dict[str, Any]
Turn = tuple[int, np.ndarray, bool]
"""A micro-batch: its random stream (an epoch, or FIXED), the indices of its samples, and whether a rank has media."""

_OF_THE_MAIN_PROCESS = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_SIGNALS = (*_OF_THE_MAIN_PROCESS, signal.SIGTERM)


@dataclass(frozen=True)
class Window:
    """One optimizer step: this rank's micro-batches."""

    step: int
    """Its number in the order of the data."""
    epoch: int
    num_samples: int
    """Rows over all ranks, without fillers; a packed row counts once."""
    quantities: dict[str, float]
    """How much of each logged quantity these rows hold, over all ranks."""
    numbers: dict[str, float]
    """What is logged about its micro-batches, such as the share of padding."""
    batches: list[Batch]

    @property
    def num_tokens(self) -> int:
        """How much of the first quantity: tokens, if samples are made of them."""
        return round(next(iter(self.quantities.values()), 0))

    def sample_ids(self) -> list[int]:
        """The rows of this rank, without fillers."""
        return [int(i) for batch in self.batches for i in batch["sample_ids"] if i >= 0]


def _unchanged(value: Any) -> Any:
    return value


class Loader:
    """Reads samples in the global order, this rank's share of every step."""

    def __init__(
        self,
        samples: Samples | Sequence[Features],
        collator: Collator,
        *,
        per_device: int,
        global_size: int | None = None,
        seed: int = 0,
        shuffle: bool = False,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        pin_memory: bool = False,
        quantities: Sequence[Quantity] = (),
        spread: Callable[[np.ndarray], np.ndarray] = _unchanged,
        even: Callable[[np.ndarray], np.ndarray] = _unchanged,
        numbers: Callable[[np.ndarray], dict[str, float]] = lambda rows: {},
    ) -> None:
        """`spread` may change the order of an epoch, `even` that of a step's rows, and `numbers` describes them."""
        if len(samples) == 0:
            raise DataError("No samples to load. Provide more data.")
        self.num_samples = len(samples)
        # Some collators lay out rows of several samples themselves.
        self.packed = getattr(samples, "fixed_length", None) is not None or collator.settings.lays_out
        self._global_size = global_size or per_device * world
        self._per_device, self._rank, self._world = per_device, rank, world
        # Two orders are kept: workers read ahead into the next epoch.
        self._order = lru_cache(2)(lambda epoch: spread(permutation(len(samples), seed, epoch, shuffle=shuffle)))
        self._batches = _Batches(samples, collator, seed)
        self._workers, self._pin_memory, self._quantities = workers, pin_memory, quantities
        self._even, self._numbers = even, numbers
        held: Any = samples
        none = np.zeros(len(samples), dtype=bool)
        self._media = held.entries(collator.media_feature) > 0 if collator.media_feature else none
        self._whole: DataLoader[Any] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Includes the partial last window."""
        return -(-self.num_samples // self._global_size)

    @property
    def num_batches(self) -> int:
        """Batches of `once`; equal on all ranks."""
        return -(-self.num_samples // (self._per_device * self._world))

    def windows(self, start_step: int = 0, left_out: Collection[int] = ()) -> Iterator[Window]:
        """Every step from `start_step` on, endlessly; windows that are left out are no steps."""
        stream = _Stream(self._open(self.turns(start_step, left_out)))
        try:
            for step in kept_windows(start_step, left_out):
                epoch, rows = self.rows(step)
                quantities = {each.name: each.amounts[rows].sum().item() for each in self._quantities}
                batches = [stream.take() for _ in self._slices(rows)]
                yield Window(step, epoch, len(rows), quantities, self._numbers(rows), batches)
        finally:
            stream.close()

    def once(self) -> Iterator[Batch]:
        """This rank's share of one pass in the order of the source."""
        # Kept for the next pass, with its workers.
        whole, self._whole = self._whole, None
        if whole is None:
            whole = self._open([(FIXED, *turn) for turn in self._slices(np.arange(self.num_samples))])
        stream = _Stream(whole)
        try:
            for _ in range(self.num_batches):
                yield stream.take()
            self._whole = whole
        finally:
            del whole
            stream.close()

    def first_batch(self) -> Batch:
        """This rank's first micro-batch, made in this process."""
        return _or_raise(self._batches[next(self.turns(0))])

    def long_sample(self, among: int = 32) -> Features:
        """The longest of the first samples, reduced to its tokens; the same on every rank."""
        first, collator = range(min(among, self.num_samples)), self._batches.collator
        return collator.without_media(max((self._batches.samples[index] for index in first), key=collator.length))

    def collate(self, rows: Sequence[Features], *, length: int | None) -> Batch:
        """A micro-batch of other rows."""
        return self._batches.of(rows, np.zeros(len(rows), dtype=np.int64), length=length)

    def batch_of(self, places: np.ndarray, media: bool | None = None) -> Batch:
        """The micro-batch of these samples, made in this process; `media`: whether a rank has some in it."""
        return _or_raise(self._batches[FIXED, places, bool(self._media.any()) if media is None else media])

    def turns(self, start_step: int, left_out: Collection[int] = ()) -> Iterator[Turn]:
        for step in kept_windows(start_step, left_out):
            epoch, rows = self.rows(step)
            yield from ((epoch, *turn) for turn in self._slices(rows))

    def rows(self, step: int) -> tuple[int, np.ndarray]:
        """The epoch of a step, and its rows over all ranks."""
        epoch, number = divmod(step, self.steps_per_epoch)
        return epoch, self._even(self._order(epoch)[number * self._global_size :][: self._global_size])

    def _slices(self, window: np.ndarray) -> list[tuple[np.ndarray, bool]]:
        """This rank's micro-batches of a step, each with whether any rank has media in it."""
        mine = rank_slices(window, per_device=self._per_device, rank=self._rank, world=self._world)
        size = self._per_device * self._world
        found = [bool(self._media[window[at * size :][:size]].any()) for at in range(len(mine))]
        # Replicas add up their gradients in the last micro-batch, so it runs every tower that the step has run.
        found[-1] = any(found)
        return list(zip(mine, found, strict=True))

    def _open(self, places: Any) -> DataLoader[Any]:
        if self._workers:
            # A tokenizer's threads do not survive a fork; without this it warns in every worker.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return _Workers(
            self._batches,
            batch_size=None,
            sampler=places,
            num_workers=self._workers,
            collate_fn=_unchanged,
            pin_memory=self._pin_memory,
            worker_init_fn=_ignore_signals,
            persistent_workers=self._workers > 0,
            prefetch_factor=4 if self._workers else None,
        )


class _Workers(DataLoader[Any]):
    """torch's loader without its warning about many workers; `fullshard check` counts those of all ranks."""

    def check_worker_number_rationality(self) -> None:
        pass


class _Batches(torch.utils.data.Dataset[Any]):
    """One collated micro-batch for given indices; runs in a worker."""

    def __init__(self, samples: Samples | Sequence[Features], collator: Collator, seed: int) -> None:
        self.samples, self.collator, self._seed = samples, collator, seed
        self._length: int | None = getattr(samples, "fixed_length", None)

    def __getitem__(self, turn: Turn) -> Batch | FullshardError:
        stream, places, media = turn
        found = places[places != FILLER]
        ids = np.concatenate([found, np.full(len(places) - len(found), FILLER, dtype=np.int64)])
        try:
            real = [self.samples[int(index)] for index in found]
            # A filler has the shape of a real sample, so all ranks run the same work.
            blank = self.collator.blank(real[0] if real else self.samples[0])
            rows: Sequence[Features] = real + [blank] * (len(places) - len(real))
            if media:
                rows = self.collator.touching(rows)
                ids = np.pad(ids, (0, len(rows) - len(ids)), constant_values=FILLER)
            return self.of(rows, ids, length=self._length, stream=stream)
        except FullshardError as error:
            # The main process raises it; torch would wrap it in a traceback.
            return error

    def of(self, rows: Sequence[Features], ids: np.ndarray, *, length: int | None, stream: int = FIXED) -> Batch:
        """One micro-batch of these rows, which have the indices `ids`."""
        keys = draws(ids, seed=self._seed, stream=stream)
        batch = self.collator.collate(rows, length=length)
        if stream != FIXED:
            batch = self.collator.augment(batch, keys)
        return {**batch, "sample_ids": torch.from_numpy(ids), "draws": torch.from_numpy(keys)}


def _or_raise(batch: Batch | FullshardError) -> Batch:
    if isinstance(batch, FullshardError):
        raise batch
    return batch


class _Stream:
    """A running DataLoader. Close it: the traceback of a kept error would keep its workers alive."""

    def __init__(self, batches: DataLoader[Any]) -> None:
        # Signals are blocked until the workers ignore them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._iterator: Iterator[Any] | None = iter(batches)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def take(self) -> Batch:
        assert self._iterator is not None
        return _or_raise(next(self._iterator))

    def close(self) -> None:
        self._iterator = None


def _ignore_signals(worker: int) -> None:
    """Signals reach the whole process group, but a worker that ends would break the save of the main process.

    Only the main process may end a worker. Only sigwaitinfo names the sender, and macOS does not have it.
    """
    for number in _OF_THE_MAIN_PROCESS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_obey_parent, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_MAIN_PROCESS)
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _obey_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
