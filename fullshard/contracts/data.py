"""The contracts of the data path: source (records) → encoder (samples, kept on disk) → packer → loader (micro-batches).

An encoder has three parts: its settings (`Encoder`), the object that they open for a run (`OpenEncoder`: records to
samples) and the one that makes micro-batches of samples (`Collator`). Must not know models, losses or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from fullshard.config.part import Part, kinds

Record = Mapping[str, Any]
"""One entry of a source."""
Features = dict[str, np.ndarray]
"""One sample: arrays by name."""

IGNORE = -100
"""The label of a position without a loss term. `labels[i]` is the target of position i: already shifted by one."""


class Records(Protocol):
    """An open source: random access to records, each with a location for error messages."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...

    def where(self, index: int) -> str:
        """`FILE:LINE`, or another way to find a record."""

    def fingerprint(self) -> str:
        """Changes when the content changes; the key of every cache."""


class Store(Protocol):
    """Encoded samples on disk."""

    names: list[str]
    """The features of a sample."""
    lengths: np.ndarray
    """Tokens of each sample; without tokens, entries of its first feature."""

    @property
    def shared(self) -> Features:
        """Arrays that belong to all samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Features: ...

    def sizes(self, name: str) -> np.ndarray:
        """The number of entries of a feature in each sample."""

    def flat(self, name: str) -> np.ndarray:
        """A feature of all samples, end to end."""


class Source(Part):
    """Where records come from."""

    folder: ClassVar[str] = "fullshard.data.sources"
    default_kind: ClassVar[str | None] = "files"
    required: ClassVar[tuple[str, ...]] = ("open",)

    @classmethod
    def from_short(cls, value: Any) -> Any:
        if isinstance(value, str) and value in kinds(cls) and not Path(value).exists():
            return {"kind": value}
        return {"path": value} if isinstance(value, (str, list)) else value

    def open(self) -> Records:
        """Checks that the data can be read, and opens it. A run calls it once on each rank."""
        raise NotImplementedError


@dataclass(frozen=True)
class DropReason:
    """Why a sample is dropped ("with no text"), and how to fix it ("put text into the records")."""

    reason: str
    fix: str


NO_TEXT = DropReason("with no text", "put text into the records or remove them")
NOTHING_LEARNED = DropReason(
    "with no answer or all labels masked",
    "give conversations an answer that is not blank, or labels that are not all -100",
)
LEARNED_TOO_LATE = DropReason("with all labels after data.sequence_length", "raise data.sequence_length")


@dataclass(frozen=True)
class Encoded:
    """What an encoder made from one record."""

    samples: Sequence[Features] = ()
    truncated: int = 0
    """Samples that were cut at the sequence length."""
    dropped: Sequence[DropReason] = ()
    """One reason for each sample that was dropped."""
    lost: Sequence[str] = ()
    """What the samples lack; continues "12 records have ..." in a warning."""
    noted: Sequence[str] = ()
    """The same for a note in the report."""


def token_samples(samples: Sequence[Features], *, length: int) -> Encoded:
    """Cuts `input_ids` and features of the same length at `length`. Drops samples whose `labels` are all IGNORE."""
    kept: list[Features] = []
    dropped: list[DropReason] = [] if samples else [NO_TEXT]
    truncated = 0
    for whole in samples:
        size = len(whole.get("input_ids", ()))
        truncated += size > length
        sample = {name: v[:length] if size > length and v.ndim and len(v) == size else v for name, v in whole.items()}
        if "labels" not in sample or not (sample["labels"] == IGNORE).all():
            kept.append(sample)
        elif len(whole["labels"]) < 2:
            dropped.append(NO_TEXT)
        else:
            dropped.append(NOTHING_LEARNED if (whole["labels"] == IGNORE).all() else LEARNED_TOO_LATE)
    return Encoded(kept, truncated, dropped)


@dataclass(frozen=True)
class Quantity:
    """Something that samples hold and that speed is logged in: `Quantity("images", "img", images_of_each_sample)`."""

    name: str
    """Plural; metrics.jsonl has `images_per_second`."""
    short: str
    """For the console: `img/s`; empty: not shown there."""
    amounts: np.ndarray
    """How much each stored sample holds."""


class Encoder(Part):
    """Settings of an encoder.

    One without state defines `encode` and `collate`. One that keeps something open, or takes numbers from the encoded
    data, overrides `open` to return its own `OpenEncoder`, which may return its own `Collator`."""

    folder: ClassVar[str] = "fullshard.data.encoders"
    required: ClassVar[tuple[str, ...]] = ("encode or open", "collate or open")
    forms: ClassVar[str] = ""
    """The records it accepts, for messages: `text: {"text": "..."}`."""
    last_resort: ClassVar[bool] = False
    """Choose it only if no other encoder accepts the first record."""
    divisible: ClassVar[bool] = False
    """Packing may cut a sample and continue it in the next row, as with running text."""
    packs_media: ClassVar[bool] = False
    """Samples with more than tokens and labels can share a row: their features are concatenated."""
    lays_out: ClassVar[bool] = False
    """The objective arranges texts in rows itself: samples are never packed."""
    length_feature: ClassVar[str] = "input_ids"
    """The feature with one entry for each token."""
    needs_training_data: ClassVar[bool] = False
    """The collator takes numbers from data.train, which is therefore needed to evaluate other data."""
    conversations: ClassVar[bool] = False
    """Samples are conversations, laid out by a chat template."""

    @staticmethod
    def accepts(record: Record) -> bool:
        """Whether to choose this encoder if the first record looks like this and the recipe names no encoder."""
        return False

    def texts(self, record: Record) -> list[str]:
        """The plain text in a record, for training a tokenizer."""
        return []

    def columns_read(self, record: Record) -> list[str]:
        """How columns of the first record were read if the user did not name them, for the report."""
        return []

    def arranged(self, records: Records) -> Records:
        """The records of a source as it encodes them: several may become one, such as the rows of an episode."""
        return records

    def added_tokens(self) -> list[str]:
        """Tokens that it adds to the tokenizer before the model is built."""
        return []

    def can_pack(self, store: Store) -> bool:
        """Whether samples can share a row: they hold tokens and labels only, or `packs_media` says so."""
        return self.packs_media or set(store.names) == {"input_ids", "labels"}

    def quantities(self, store: Store) -> list[Quantity]:
        """The quantities that speed is logged in, such as tokens, images or seconds of audio. `tokens` in metrics.jsonl
        and flops per token refer to the first one."""
        return [Quantity("tokens", "tok", store.lengths)]

    def check_model(self, module: Any) -> None:
        """Raises if the (empty) model cannot take these samples. Called before any record is encoded."""

    def frozen(self) -> dict[str, Any]:
        """Families of frozen models that objectives run on its features in every step, as part of `aux`."""
        return {}

    def open(self, processor: Any, *, length: int) -> OpenEncoder:
        """The encoder of one run, with the model's tokenizer or processor; samples have at most `length` tokens."""
        return OpenEncoder(self, processor, length=length)

    def encode(self, record: Record, processor: Any, *, length: int) -> Sequence[Features] | Encoded:
        """The samples of one record. `token_samples` is applied to them; return `Encoded` to do that yourself.

        Raises DataError with a message about the record alone; the caller adds its location."""
        raise NotImplementedError

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        """The tensors of one micro-batch, padded to `length`, or to the longest sample if it is None."""
        raise NotImplementedError


class OpenEncoder:
    """Turns records into samples with the processor of a run. The samples are kept on disk."""

    def __init__(self, settings: Encoder, processor: Any, *, length: int) -> None:
        self.settings: Any = settings
        self.processor, self.length = processor, length

    def encode(self, record: Record) -> Encoded:
        found = self.settings.encode(record, self.processor, length=self.length)
        return found if isinstance(found, Encoded) else token_samples(found, length=self.length)

    def encode_many(self, records: Sequence[Record]) -> list[Encoded]:
        """The same for several records, for tokenizers that are faster on many texts."""
        return [self.encode(record) for record in records]

    def shared_features(self) -> Features:
        """Arrays that belong to all samples, stored once. Called after the last record."""
        return {}

    def close(self) -> None:
        """Frees what only encoding needs. Called when all data is encoded."""

    def collator(self, store: Store) -> Collator:
        """The object that makes micro-batches; `store` is the encoded training data."""
        return Collator(self.settings)

    def external_fingerprint(self, records: Records) -> str:
        """Changes when the files or other things that records refer to change; part of the cache key."""
        return ""

    def identity(self, store: Store) -> dict[str, str]:
        """Fingerprints by name, besides that of the records, that must be the same when a run resumes."""
        return {}

    def notes(self) -> list[str]:
        """Decisions about the layout of samples that the user did not make, for the report."""
        return []

    def contents(self, store: Store, chosen: np.ndarray) -> str:
        """What the chosen samples contain, for the report."""
        return "not packed"

    def passages(self, sample: Features) -> Sequence[tuple[str, int]]:
        """A sample in parts for a person to read: what each says in words, and its number of tokens."""
        return [("", len(sample["input_ids"]))]

    def chat_template(self) -> str | None:
        """Which template lays out conversations, or None for other data."""
        return None

    def annotate_processor(self) -> None:
        """Stores on the processor how inputs were laid out in training; the processor is exported with the model."""


class Collator:
    """Turns samples into micro-batches, in the loader's worker processes."""

    notes: Sequence[str] = ()
    """What it took from the training data, for the report."""
    media_feature: str | None = None
    """The feature with an entry for each image or clip of a sample, for models with towers; None: tokens alone."""

    def __init__(self, settings: Encoder) -> None:
        self.settings: Any = settings

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        """The tensors of one micro-batch, padded to `length`, or to the longest sample if it is None."""
        found: dict[str, Any] = self.settings.collate(samples, length=length)
        return found

    def length(self, sample: Features) -> int:
        """Tokens of a row."""
        return len(sample.get(self.settings.length_feature, ()))

    def blank(self, sample: Features) -> Features:
        """A sample of the same shape without loss terms, to fill up a batch."""
        return {name: np.full_like(array, IGNORE) if name == "labels" else array for name, array in sample.items()}

    def touching(self, samples: Sequence[Features]) -> Sequence[Features]:
        """The samples, plus a row without loss terms if they have no media but those of another rank do: if one rank
        runs a tower, every rank must, or the first would wait for the others."""
        return samples

    def without_media(self, sample: Features) -> Features:
        """The tokens of the sample alone, so that it can be cut anywhere."""
        return sample

    def augment(self, batch: dict[str, Any], draws: np.ndarray) -> dict[str, Any]:
        """Random changes to a training batch; `draws` holds a random key for each sample."""
        return batch

    def decode(self, values: Any) -> Any:
        """Values that a model generated, in the form of the records: undoes the scaling of `collate`."""
        return values
