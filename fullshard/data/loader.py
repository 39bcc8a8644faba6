"""Micro-batches, step by step, made ahead of time by worker processes.

A step is found from its number alone: no state is kept and none needs saving. Must not know record formats, models or
torch.distributed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from fullshard.contracts.data import Collator, Features, Samples
from fullshard.data.order import FILLER, FIXED, draws, permutation, rank_slices
from fullshard.errors import DataError, FullshardError

Batch = dict[str, Any]
Turn = tuple[int, np.ndarray]
"""The stream of a micro-batch's randomness (its epoch, or FIXED) and the indices of its samples."""

_OF_THE_MAIN_PROCESS = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_SIGNALS = (*_OF_THE_MAIN_PROCESS, signal.SIGTERM)


@dataclass(frozen=True)
class Window:
    """One optimizer step: this rank's micro-batches."""

    step: int
    epoch: int
    num_samples: int
    """Rows over all ranks: samples, where they are not packed; fillers do not count."""
    num_tokens: int
    """Real tokens over all ranks."""
    batches: list[Batch]

    def sample_ids(self) -> list[int]:
        """The rows of this rank, without fillers."""
        return [int(i) for batch in self.batches for i in batch["sample_ids"] if i >= 0]


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
    ) -> None:
        if len(samples) == 0:
            raise DataError("there are no samples to load. Give more data.")
        self.num_samples = len(samples)
        self._global_size = global_size or per_device * world
        self._per_device, self._rank, self._world = per_device, rank, world
        self._seed, self._shuffle = seed, shuffle
        self._batches = _Batches(samples, collator, seed)
        self._workers, self._pin_memory = workers, pin_memory
        self._whole: DataLoader[Any] | None = None
        self._orders: dict[int, np.ndarray] = {}

    @property
    def steps_per_epoch(self) -> int:
        """The partial last window of an epoch counts as a step."""
        return -(-self.num_samples // self._global_size)

    @property
    def num_batches(self) -> int:
        """Batches of `once`, the same on every rank."""
        return -(-self.num_samples // (self._per_device * self._world))

    def windows(self, start_step: int = 0) -> Iterator[Window]:
        """Every step from `start_step` on, over as many epochs as are asked for."""
        stream = _Stream(self._open(_Places(self, start_step)))
        try:
            for step in count(start_step):
                epoch, window = divmod(step, self.steps_per_epoch)
                size = min(self._global_size, self.num_samples - window * self._global_size)
                num_batches = -(-size // (self._per_device * self._world))
                tokens = self._tokens(self._order(epoch)[window * self._global_size :][:size])
                yield Window(step, epoch, size, tokens, [stream.take() for _ in range(num_batches)])
        finally:
            stream.close()

    def once(self) -> Iterator[Batch]:
        """This rank's share of one pass in the order of the source: every sample once over all ranks."""
        # Kept from one pass to the next, and its workers with it.
        whole, self._whole = self._whole, None
        if whole is None:
            whole = self._open([(FIXED, places) for places in self._slices(np.arange(self.num_samples))])
        stream = _Stream(whole)
        try:
            for _ in range(self.num_batches):
                yield stream.take()
            self._whole = whole
        finally:
            del whole
            stream.close()

    def first_batch(self) -> Batch:
        """This rank's first micro-batch, made here and now."""
        return self._made(next(self.turns(0)))

    def long_sample(self, among: int = 32) -> Features:
        """The longest of the first samples of the source, the same on every rank."""
        first = (self._batches.samples[index] for index in range(min(among, self.num_samples)))
        return max(first, key=lambda sample: len(sample.get("input_ids", ())))

    def collate(self, rows: Sequence[Features], *, length: int | None) -> Batch:
        """A micro-batch of rows that are in no source."""
        return self._batches.of(rows, np.zeros(len(rows), dtype=np.int64), length=length)

    def batch_of(self, places: np.ndarray) -> Batch:
        """The micro-batch of these samples, made here and now."""
        return self._made((FIXED, places))

    def turns(self, start_step: int) -> Iterator[Turn]:
        """This rank's micro-batches, endlessly."""
        for step in count(start_step):
            epoch, window = divmod(step, self.steps_per_epoch)
            places = self._order(epoch)[window * self._global_size :][: self._global_size]
            yield from ((epoch, slice_) for slice_ in self._slices(places))

    def _made(self, turn: Turn) -> Batch:
        batch = self._batches[turn]
        if isinstance(batch, FullshardError):
            raise batch
        return batch

    def _order(self, epoch: int) -> np.ndarray:
        # Two are kept: workers read ahead into the next epoch while this one is counted.
        if epoch not in self._orders:
            kept = dict(sorted(self._orders.items())[-1:])
            order = permutation(self.num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            self._orders = kept | {epoch: order}
        return self._orders[epoch]

    def _tokens(self, indices: np.ndarray) -> int:
        samples = self._batches.samples
        if hasattr(samples, "tokens_in"):
            return samples.tokens_in(indices)
        return sum(len(samples[int(i)].get("input_ids", ())) for i in indices)

    def _slices(self, window: np.ndarray) -> list[np.ndarray]:
        return rank_slices(window, per_device=self._per_device, rank=self._rank, world=self._world)

    def _open(self, places: Any) -> DataLoader[Any]:
        if self._workers:
            # A tokenizer's threads do not survive a fork; saying so beforehand keeps it from warning in every worker.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return _Workers(
            self._batches,
            batch_size=None,
            sampler=places,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            pin_memory=self._pin_memory,
            worker_init_fn=_deaf,
            persistent_workers=self._workers > 0,
            prefetch_factor=4 if self._workers else None,
        )


class _Workers(DataLoader[Any]):
    """torch's loader, without its word on their number: the check counts the workers of all ranks against the cores."""

    def check_worker_number_rationality(self) -> None:
        pass


@dataclass(frozen=True)
class _Places:
    loader: Loader
    start_step: int

    def __iter__(self) -> Iterator[Turn]:
        return self.loader.turns(self.start_step)


class _Batches(torch.utils.data.Dataset[Any]):
    """Indices in, one collated micro-batch out; the part that runs in a worker."""

    def __init__(self, samples: Samples | Sequence[Features], collator: Collator, seed: int) -> None:
        self.samples, self._collator, self._seed = samples, collator, seed
        self._length: int | None = getattr(samples, "fixed_length", None)

    def __getitem__(self, turn: Turn) -> Batch | FullshardError:
        stream, places = turn
        ids = _real_first(places)
        try:
            real = [self.samples[int(index)] for index in places if index != FILLER]
            # A filler has the shape of a real sample, so that every rank runs the same kind of work.
            blank = self._collator.blank(real[0] if real else self.samples[0])
            rows = real + [blank] * (len(places) - len(real))
            return self.of(rows, ids, length=self._length, stream=stream)
        except FullshardError as error:
            # Raised in the main process: on its way there torch would wrap it in a traceback.
            return error

    def of(self, rows: Sequence[Features], ids: np.ndarray, *, length: int | None, stream: int = FIXED) -> Batch:
        """One micro-batch of these features, which are the samples `ids`."""
        keys = draws(ids, seed=self._seed, stream=stream)
        batch = self._collator.collate(rows, length=length)
        if stream != FIXED:
            batch = self._collator.augment(batch, keys)
        return {**batch, "sample_ids": torch.from_numpy(ids), "draws": torch.from_numpy(keys)}


def _real_first(places: np.ndarray) -> np.ndarray:
    real = places[places != FILLER]
    return np.concatenate([real, np.full(len(places) - len(real), FILLER, dtype=np.int64)])


def _as_it_is(batch: Any) -> Any:
    return batch


class _Stream:
    """A running DataLoader. To be closed on the way out: an error may live long, and with it all that its traceback can
    reach, the workers too."""

    def __init__(self, batches: DataLoader[Any]) -> None:
        # Signals are held back meanwhile, so that none reaches a worker before it is deaf to it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._iterator: Iterator[Any] | None = iter(batches)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def take(self) -> Batch:
        assert self._iterator is not None
        batch = next(self._iterator)
        if isinstance(batch, FullshardError):
            raise batch
        return cast(Batch, batch)

    def close(self) -> None:
        self._iterator = None


def _deaf(worker: int) -> None:
    """Signals reach the whole process group; a worker that obeyed one would break the save of the main process.

    Only the main process may end it; who sent a signal is told by sigwaitinfo alone, which macOS does not have.
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
