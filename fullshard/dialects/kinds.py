"""What a value in another trainer's file may be: a switch, a count, a share, text, a section.

Any other word is refused: it is never read as on, off or a number. The kinds of our own keys are
here too; a test compares them with the recipe, which this file must not know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fullshard.formatting.yaml_text import parse_value, shown

_ON = ("true", "yes", "on", "1", "y", "t")
_OFF = ("false", "no", "off", "0", "n", "f", "none", "")
"""As YAML, argparse and the HF parser spell them."""


class BadValue(Exception):
    """A value that a key does not take; the message says what it takes."""

    def __init__(self, value: Any, needed: str) -> None:
        found = f"'{value}'" if isinstance(value, str) else shown(value)
        super().__init__(f"it must be {needed}, not {found}")

    def about(self, key: str) -> BadValue:
        """The same, with the key that the value was meant for."""
        self.args = (f"{key}: {self}",)
        return self


@dataclass(frozen=True)
class Kind:
    """What a key takes, in words, and how a value is read."""

    needed: tuple[str, ...]
    """The alternatives, as a sentence names them."""
    readers: tuple[Callable[[Any], Any], ...]
    """One for each; it returns the value, or None for a value that it does not take."""

    def read(self, value: Any) -> Any:
        """The value in its own type; BadValue for any other."""
        for reader in self.readers:
            if (found := reader(value)) is not None:
                return found
        *some, last = self.needed
        raise BadValue(value, f"{', '.join(some)} or {last}" if some else last)

    def __or__(self, other: Kind) -> Kind:
        return Kind((*self.needed, *other.needed), (*self.readers, *other.readers))


def is_off(value: Any) -> bool:
    """Whether a word asks for nothing: false, `no`, `none`, or no word at all."""
    return value is None or (not isinstance(value, (list, Mapping)) and shown(value).lower() in _OFF)


def one_of(*words: str) -> Kind:
    """One of these words, in any case, as it is written here."""
    known = {word.lower(): word for word in words}
    return Kind(words, (lambda value: None if _is_many(value) else known.get(shown(value).lower()),))


def whole(*, at_least: int) -> Kind:
    """A whole number, also as text or as 3.0."""

    def read(value: Any) -> int | None:
        found = _number(value)
        return int(found) if found is not None and found == int(found) and found >= at_least else None

    return Kind((f"a whole number of at least {at_least}",), (read,))


def number(
    needed: str,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> Kind:
    """A finite number within bounds."""

    def read(value: Any) -> float | None:
        found = _number(value)
        return found if found is not None and above < found < below and at_least <= found <= most else None

    return Kind((needed,), (read,))


def _number(value: Any) -> float | int | None:
    if isinstance(value, str):
        value = parse_value(value, where="") if value[:1] not in ("[", "{") else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _switch(value: Any) -> bool | None:
    word = "" if _is_many(value) else shown(value).lower()
    return True if word in _ON else False if word in _OFF and not _is_many(value) else None


def _text(value: Any) -> str | None:
    return None if _is_many(value) or isinstance(value, bool) or value in ("", None) else shown(value)


def _texts(value: Any) -> list[str] | None:
    """A list of words, or words with commas between them."""
    words = value if isinstance(value, list) else str(value).split(",") if isinstance(value, str) else []
    found = [_text(word.strip() if isinstance(word, str) else word) for word in words]
    named = [word for word in found if word is not None]
    return named if len(named) == len([word for word in words if word != ""]) and (named or value == []) else None


def _is_many(value: Any) -> bool:
    return isinstance(value, (list, tuple, Mapping))


def _betas(value: Any) -> list[float] | None:
    pair = [_number(each) for each in value] if isinstance(value, (list, tuple)) else []
    return (
        [each for each in pair if each is not None] if len(pair) == 2 and all(0 <= (b or 0) < 1 for b in pair) else None
    )


def _precision(value: Any) -> str | None:
    word = "fp32" if value is False else shown(value).lower().replace("_", "-").removeprefix("torch.")
    return word if word in PRECISIONS else None


def _devices(value: Any) -> Any:
    ids = value if isinstance(value, list) else []
    return value if ids and all(isinstance(each, int) and each >= 0 for each in ids) else COUNT.readers[0](value)


def _name(value: Any) -> str | None:
    """The name of a folder: what a name cannot have becomes a hyphen."""
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", _text(value) or "").strip("-._")
    return text or None


def _sources(value: Any) -> list[Any] | None:
    """A list of files, or of sections that each describe one."""
    entries = value if isinstance(value, list) else []
    known = [entry for entry in entries if isinstance(entry, (str, Mapping)) and entry]
    return entries if entries and len(known) == len(entries) else None


def _columns(value: Any) -> Mapping[str, str] | None:
    pairs = value.items() if isinstance(value, Mapping) else [("", None)]
    return value if all(isinstance(word, str) for pair in pairs for word in pair) else None


def _recompute(value: Any) -> str | None:
    """`gradient_checkpointing: true` recomputes everything."""
    return {True: "full", False: "none", None: None}[_switch(value)]


def _dims(value: Any) -> list[int] | None:
    dims = [COUNT.readers[0](each) for each in value] if isinstance(value, list) else []
    return dims if dims and None not in dims else None


PRECISIONS = (
    *("auto", "bf16", "bf16-mixed", "bfloat16", "fp16", "16-mixed", "float16", "16", "fp32", "32", "32-true"),
    *("float32", "none", "no", "bf16-pure", "bf16-true", "pure-bf16", "float8", "fp8"),
    *("float8-gather", "fp8-gather", "float8-emulated", "float8-gather-emulated"),
)
SWITCH = Kind(("true or false",), (_switch,))
COUNT = whole(at_least=1)
WHOLE = whole(at_least=0)
ANY_WHOLE = whole(at_least=-1)
"""-1 stands for a value that is not set."""
NUMBER = number("a number")
POSITIVE = number("a number above 0", above=0)
NOT_NEGATIVE = number("a number of at least 0", at_least=0)
SHARE = number("a number from 0 to below 1", at_least=0, below=1)
UP_TO_ONE = number("a number from 0 to 1", at_least=0, most=1)
TEXT = Kind(("text",), (_text,))
TEXTS = Kind(("a list of words",), (_texts,))
SECTION = Kind(("a section of keys",), (lambda value: value if isinstance(value, Mapping) else None,))
LIST = Kind(("a list",), (lambda value: value if isinstance(value, list) else None,))
ANYTHING = Kind((), (lambda value: value,))
"""For a key whose row reports or refuses every value."""
BETAS = Kind(("two numbers from 0 to below 1",), (_betas,))
PRECISION = Kind(("a precision such as bf16, fp16 or fp32",), (_precision,))
DEVICES = Kind(("a number of devices of at least 1 or a list of their ids",), (_devices,))
DIMS = Kind(("a list of numbers such as [512, 256]",), (_dims,))
AUTO = one_of("auto")

_OF_KEYS: tuple[tuple[Kind, str], ...] = (
    (
        COUNT,
        "batch.accumulate batch.global batch.per_device checkpoint.every_epochs checkpoint.every_steps checkpoint.keep "
        "duration.steps evaluate.every_epochs evaluate.every_steps evaluate.patience evaluate.per_device "
        "log.every_steps model.lora.r objective.cache schedule.step_size sharding.wrap.min_params topology.nodes",
    ),
    (WHOLE, "data.workers seed"),
    (whole(at_least=2), "data.sequence_length"),
    (
        POSITIVE,
        "duration.epochs optimizer.lr optimizer.eps optimizer.clip model.lora.alpha objective.loss.temperature "
        "topology.timeout_s",
    ),
    (NOT_NEGATIVE, "optimizer.weight_decay"),
    (UP_TO_ONE | COUNT, "schedule.warmup"),
    (SHARE, "data.holdout model.lora.dropout ema.decay"),
    (UP_TO_ONE, "schedule.floor"),
    (number("a number above 0, at most 1", above=0, most=1), "schedule.gamma"),
    (
        SWITCH,
        "checkpoint.asynchronous data.pack data.shuffle evaluate.at_start log.debug model.normalize "
        "model.trust_remote_code sharding.compile sharding.cpu_offload sharding.forward_prefetch "
        "sharding.sync_batchnorm",
    ),
    (BETAS, "optimizer.betas"),
    (PRECISION, "precision"),
    (DEVICES, "topology.devices"),
    (one_of("auto", "cuda", "cpu"), "topology.device"),
    (one_of("full", "sharded"), "checkpoint.format"),
    (one_of("min", "max"), "checkpoint.best.mode"),
    (one_of("auto", "full", "grad_op", "hybrid", "none"), "sharding.strategy"),
    (
        one_of("none", "selective", "full") | Kind(("true or false",), (_recompute,)),
        "sharding.activation_checkpointing",
    ),
    (
        one_of("auto", "sdpa", "eager", "flex_attention", "flash_attention_2", "varlen", "flash_attention_4"),
        "model.attention",
    ),
    (one_of("all-linear") | TEXTS, "model.lora.targets"),
    (TEXTS, "sharding.wrap.classes"),
    (DIMS, "objective.matryoshka"),
    (
        TEXT,
        "checkpoint.best.metric data.encode.image_root data.encode.mode model.architecture model.path model.pooling "
        "model.revision model.size model.tokenizer optimizer.kind output schedule.kind",
    ),
    (Kind(("text",), (_name,)), "name"),
    (TEXT | Kind(("a list of files",), (_sources,)) | SECTION, "data.train data.validation"),
    (SWITCH | TEXT | SECTION, "model.lora"),
    (Kind(("a section of names",), (_columns,)), "data.encode.column_mapping"),
)
OF_KEYS = {key: kind for kind, keys in _OF_KEYS for key in keys.split()}
"""What our keys take, as far as other trainers' files set them."""
