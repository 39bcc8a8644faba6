"""The contracts of the data path: source (records) → encoder (features) → packer → order → loader.

Must not know models, losses or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from fullshard.config.part import Part, kinds

if TYPE_CHECKING:
    from fullshard.data.store import Store

Record = Mapping[str, Any]
"""One entry of a source as it was stored."""
Features = dict[str, np.ndarray]
"""What the model sees of one sample: arrays by name."""

IGNORE = -100
"""The label of a position without a loss term. `labels[i]` is the target of position i: already shifted by one."""


class Records(Protocol):
    """An open source: random access to records, each with a place to name in an error."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...

    def where(self, index: int) -> str:
        """`FILE:LINE`, or whatever finds the record again."""
        ...

    def fingerprint(self) -> str:
        """Changes when the content changes; the key of every cache."""
        ...


class Samples(Protocol):
    """Rows ready to be batched, each a sample or several packed: what the order and the loader work on. A plain list of
    features will do too."""

    @property
    def num_tokens(self) -> int:
        """Real tokens over all rows."""
        ...

    @property
    def fixed_length(self) -> int | None:
        """The one length that every row is padded to; None when rows are padded to the longest of their micro-batch."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """Real tokens of each row."""
        ...

    def tokens_in(self, indices: np.ndarray) -> int:
        """Real tokens of some rows."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Features: ...


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
        """Checks that the data is there and can be read, and gives access to it."""
        raise NotImplementedError


class Encoder(Part):
    """Turns a record into features."""

    folder: ClassVar[str] = "fullshard.data.encoders"
    required: ClassVar[tuple[str, ...]] = ("encode or encode_many", "collate")
    forms: ClassVar[str] = ""
    """The records that it accepts, for a message: `text: {"text": "..."}`."""
    last_resort: ClassVar[bool] = False
    """Whether it is chosen only where no other encoder accepts the first record."""
    divisible: ClassVar[bool] = False
    """Whether a sample may be cut anywhere and go on in another row, as running text may; others are packed whole."""
    lays_out: ClassVar[bool] = False
    """Whether the objective lays texts out in rows by itself; the feature `lengths` then has an entry for each text."""
    unit: ClassVar[str] = "tokens"
    """What speed is counted in. `images`: each sample is one."""

    conversations: ClassVar[bool] = False
    """Whether samples are conversations, laid out by a chat template."""

    @staticmethod
    def accepts(record: Record) -> bool:
        """Whether a record has one of its forms, so that it is chosen where the recipe names no encoder."""
        return False

    def encode(self, record: Record, processor: Any, *, length: int) -> Sequence[Features]:
        """The samples of one record; none when nothing in it can be learned from.

        `input_ids` longer than `length` are cut at their end by the caller, and counted. An encoder that cuts by itself
        says so in a feature `cut` of one entry, which is counted and not kept. So are `lost` and `noted` of a record's
        first sample, lines that continue "12 records have ...": a warning, and a note of the report. Raises DataError
        in words about the record alone; the caller adds the place."""
        raise NotImplementedError

    def encode_many(self, records: Sequence[Record], processor: Any, *, length: int) -> list[Sequence[Features]]:
        """The same for several records at once; overridden where a tokenizer is faster on a batch."""
        return [self.encode(record, processor, length=length) for record in records]

    def outside(self, records: Records) -> str:
        """A fingerprint of what records name but do not hold, such as files; empty where there is nothing."""
        return ""

    def check_model(self, module: Any) -> None:
        """Refuses a model that does not take what this encoder makes; called with the empty model, before any record
        is encoded."""

    def common(self) -> Features:
        """What all samples share, kept once with them as `store.common`; asked for when the last record is encoded."""
        return {}

    @property
    def settles(self) -> bool:
        """Whether `settle` takes something from the training data."""
        return type(self).settle is not Encoder.settle

    def frozen(self) -> dict[str, Any]:
        """Families of models that turn its features into inputs in every step; not trained, and part of `aux`."""
        return {}

    def settle(self, store: Store) -> None:
        """Takes from the encoded training data what no single record tells; on every rank, before the first batch."""

    def close(self) -> None:
        """Frees what only encoding needs; called when all data is encoded."""

    def identity(self, store: Store) -> dict[str, str]:
        """What the encoded training data follows from beside its records, by name: must not change up to a resume."""
        return {}

    def texts(self, record: Record) -> list[str]:
        """The plain text in a record, for training a tokenizer; none where there is none."""
        return []

    def chat_template(self, tokenizer: Any) -> str | None:
        """Which template lays conversations out, in words; None where there are none."""
        return None

    def notes(self, processor: Any) -> list[str]:
        """What was decided about the layout of samples that the user did not say, a line each, for the report."""
        return []

    def reads(self, record: Record) -> list[str]:
        """Which columns of a record were taken for what, where the user did not say, a line each, for the report."""
        return []

    def leave_on(self, processor: Any, *, length: int) -> None:
        """Writes on the processor what its user must know to lay out inputs as in training; it is exported with it.
        `length`: at how many tokens the run cuts."""

    def blank(self, sample: Features) -> Features:
        """A sample without loss terms, to fill a batch that has too few; never enters a loss or a metric."""
        return {name: np.full_like(array, IGNORE) if name == "labels" else array for name, array in sample.items()}

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        """Tensors of one micro-batch; padded to `length`, or to the longest sample when it is None."""
        raise NotImplementedError

    def augment(self, batch: dict[str, Any], draws: np.ndarray) -> dict[str, Any]:
        """The batch with random changes, in training only; `draws` are the keys of its samples' randomness."""
        return batch

    @property
    def shows_latents(self) -> bool:
        """Whether what `shown` returns is no picture."""
        return False

    def shown(self, images: Any) -> Any:
        """Images of a batch with values from -1 to 1, as a person looks at them: without what `collate` scaled."""
        return images
