"""Texts and images that belong together: a query, its positive, optional negatives and label. One sample per record.

With a vision-language model every text goes through the chat template, and pixels are computed with the batch. Must not
know source files, ranks or how texts are laid out in rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from fullshard.config.part import Section, did_you_mean
from fullshard.contracts.data import Collator, Encoded, Encoder, Features, OpenEncoder, Record, Store
from fullshard.data.records import MAPPING
from fullshard.errors import DataError, RecipeError
from fullshard.families.embedding.pair_columns import ALIASES, IMAGES, KINDS, Columns, Pair
from fullshard.formatting.plural import counted
from fullshard.images.reading import UNREADABLE, Picture, Unreadable, features_of, look_at, read_again, stored_in
from fullshard.multimodal.pair_tokens import Input, tokenise_inputs
from fullshard.text.tokens import tokenizer_of

FORMS = (
    'pairs: {"query": "...", "positive": "..."} (with optional "negatives" and "label"; images in "query_image", '
    '"positive_image" and "negative_images")'
)

_SURE = (("anchor", "positive"), ("sentence1", "sentence2"), ("query_text", "pos_text"))
"""Columns that together can only be a pair."""
_DOCUMENT = ("document", "passage", "corpus")
"""What models call the prompt of a document."""


class Prompts(Section):
    """Put before each text; as the system message if the model has a chat template for images."""

    query: str | None = None
    """Before every query; null: the model's own, if it has one."""
    document: str | None = None
    """Before every positive and negative; null: the model's own, if it has one."""


class Pairs(Encoder):
    """Queries and what they should find, texts or images, for embedding models.

    A query or a positive may be both at once; a negative is one of them, the texts of a record before its images."""

    forms: ClassVar[str] = FORMS
    last_resort: ClassVar[bool] = True
    lays_out: ClassVar[bool] = True
    length_feature: ClassVar[str] = "tokens"

    column_mapping: dict[str, str] = {}
    """Your columns for query, positive, negatives and label, or for query_image, positive_image and negative_images."""
    image_root: Path | None = None
    """Where relative paths of images start; null: the current folder."""
    mode: Literal["t2t", "t2i", "i2t", "i2i", "m2t", "m2i"] | None = None
    """What every record must be: from text, image or both (m) to texts or images; null: each record by its columns."""
    unreadable: Literal["error", "skip"] = "error"
    """What to do if an image cannot be read, found when the data is encoded: stop, or skip and count its record."""
    prompts: Prompts = Prompts()
    """Put before each text."""
    negatives: int | None = Field(None, ge=0)
    """At most this many negatives of a record, the first ones, texts before images; null: all."""

    @field_validator("column_mapping")
    @classmethod
    def _known(cls, mapping: dict[str, str]) -> dict[str, str]:
        known = [*ALIASES, *IMAGES]
        for name, column in mapping.items():
            if name not in known:
                raise ValueError(
                    f"{name!r} is not a part of a pair{did_you_mean(name, known)}. Known: {', '.join(known)}"
                )
            if name in IMAGES and (text := next((n for n in ALIASES if mapping.get(n) == column), None)):
                raise ValueError(
                    f"{column!r} is mapped to both {text!r} and {name!r}, but holds texts or images, not both"
                )
        return mapping

    @staticmethod
    def accepts(record: Record) -> bool:
        keys = {key for key, value in record.items() if value is not None}
        return bool(keys & {"query", "query_image", "positive_image"}) or any(keys.issuperset(p) for p in _SURE)

    def open(self, processor: Any, *, length: int) -> OpenPairs:
        return OpenPairs(self, processor, length=length)

    def texts(self, record: Record) -> list[str]:
        return self.read(record).texts

    def columns_read(self, record: Record) -> list[str]:
        return Columns(self.column_mapping).report(record)

    def pair(self, record: Record) -> Pair:
        """A record that must hold texts alone."""
        found = self.read(record)
        _refuse_images(found, "only texts are read here. Leave those records out")
        return found

    def document(self, record: Record) -> str:
        """The text of a record that is a single document: in a column of the positive, or in `text`."""
        return Columns(self.column_mapping).document(record)

    def read(self, record: Record) -> Pair:
        """A record, with at most `negatives` negatives."""
        pair = Columns(self.column_mapping).pair(record)
        if self.mode is not None:
            _check_mode(pair, self.mode)
        stop = None if self.negatives is None else 2 + self.negatives
        return Pair(pair.entries[:stop], pair.label)

    def prompts_for(self, processor: Any) -> tuple[str, str]:
        """The prompts of queries and of documents."""
        own = getattr(processor, "prompts", None) or {}
        query, document = self.prompts.query, self.prompts.document
        if query is None:
            query = own.get("query")
        if document is None:
            document = next((own[name] for name in _DOCUMENT if own.get(name)), None)
        return query or "", document or ""

    def prompt_notes(self, processor: Any) -> list[str]:
        """The prompts in use, for the report."""
        said = []
        for side, used in zip(("query", "document"), self.prompts_for(processor), strict=True):
            whose = " (the model's own)" if used and getattr(self.prompts, side) is None else ""
            said.append(f"{side} {used!r}{whose}" if used else f"{side} none")
        return [f"prompts: {', '.join(said)}"]


class OpenPairs(OpenEncoder):
    """Tokenizes the texts of pairs, each with its prompt, and reads their images."""

    settings: Pairs

    def __init__(self, settings: Pairs, processor: Any, *, length: int) -> None:
        super().__init__(settings, processor, length=length)
        self._prompts = settings.prompts_for(processor)

    def encode(self, record: Record) -> Encoded:
        return self.encode_many([record])[0]

    def encode_many(self, records: Sequence[Record]) -> list[Encoded]:
        tokenizer = tokenizer_of(self.processor, needed_by="pairs")
        pairs = [self.settings.read(record) for record in records]
        if _takes_images(self.processor):
            return self._encode_with_images(pairs)
        for pair in pairs:
            _refuse_images(pair, "this model takes no images. Use a vision-language model")
        query, document = self._prompts
        texts = [(document if at else query) + text for pair in pairs for at, text in enumerate(pair.texts)]
        tokenised = iter(_tokenise(texts, tokenizer, length=self.length))
        return [_encoded([next(tokenised) for _ in pair.texts], pair.label) for pair in pairs]

    def _encode_with_images(self, pairs: Sequence[Pair]) -> list[Encoded]:
        images = [image for pair in pairs for image in pair.images]
        looked = iter(look_at(images, root=self.settings.image_root, num_tokens=self.processor.image_tokens))
        found = [[None if entry.image is None else next(looked) for entry in pair.entries] for pair in pairs]
        rows = [self._readable(row) for row in found]
        inputs = [
            Input(entry.text, picture.tokens if picture else 0, self._prompts[at > 0])
            for pair, row in zip(pairs, rows, strict=True)
            if row is not None
            for at, (entry, picture) in enumerate(zip(pair.entries, row, strict=True))
        ]
        tokenised = iter(tokenise_inputs(inputs, self.processor, length=self.length))
        return [
            Encoded(dropped=[UNREADABLE])
            if row is None
            else _encoded([next(tokenised) for _ in row], pair.label, features_of(row))
            for pair, row in zip(pairs, rows, strict=True)
        ]

    def _readable(self, row: Sequence[Picture | Unreadable | None]) -> list[Picture | None] | None:
        """The images of a record; None if one cannot be read and the record is skipped."""
        problem = next((picture for picture in row if isinstance(picture, Unreadable)), None)
        if problem is not None and self.settings.unreadable == "error":
            raise problem
        return None if problem else [picture for picture in row if not isinstance(picture, Unreadable)]

    def single_texts(self, texts: Sequence[str], side: str) -> list[Features]:
        """Samples of one text each, a `query` or a `document`, cut and with prompts as in training."""
        prompt = self._prompts[side != "query"]
        if _takes_images(self.processor):
            tokenised = tokenise_inputs([Input(text, 0, prompt) for text in texts], self.processor, length=self.length)
            return [_features([ids], 0.0) | features_of([None]) for ids in tokenised]
        tokenizer = tokenizer_of(self.processor, needed_by="pairs")
        tokenised = _tokenise([prompt + text for text in texts], tokenizer, length=self.length)
        return [_features([ids], 0.0) for ids in tokenised]

    def collator(self, store: Store) -> PairCollator:
        return PairCollator(self.settings, self.processor if _takes_images(self.processor) else None)

    def notes(self) -> list[str]:
        return self.settings.prompt_notes(self.processor)

    def contents(self, store: Store, chosen: np.ndarray) -> str:
        features = {"text": "lengths", "image": "image_sizes"}
        return ", ".join(
            counted(int(store.sizes(feature)[chosen].sum()), noun)
            for noun, feature in features.items()
            if feature in store.names
        )

    def annotate_processor(self) -> None:
        own = getattr(self.processor, "prompts", None) or {}
        query, document = self._prompts
        # Under every name that the model has for it; prompts for other uses stay.
        documents = ["document", *(name for name in _DOCUMENT if name in own)]
        used = {**own, "query": query, **dict.fromkeys(documents, document)}
        self.processor.prompts = {name: prompt for name, prompt in used.items() if prompt}
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        if hasattr(tokenizer, "init_kwargs"):
            # Saved with the tokenizer, so checkpoints have them too.
            tokenizer.init_kwargs["prompts"] = dict(self.processor.prompts)
            tokenizer.init_kwargs["trained_length"] = self.length


class PairCollator(Collator):
    """Joins the texts of pairs, and computes the pixels of their images."""

    settings: Pairs

    def __init__(self, settings: Pairs, vision: Any = None) -> None:
        super().__init__(settings)
        self._vision = vision

    def blank(self, sample: Features) -> Features:
        starts = np.cumsum(sample["lengths"]) - sample["lengths"]
        texts = {"tokens": sample["tokens"][starts], "lengths": np.ones_like(sample["lengths"])}
        images = features_of([None] * len(starts)) if "images" in sample else {}
        return {**sample, **texts, **images}

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        """`tokens` of all texts on one axis, the `lengths` of texts and the number of `texts` in each sample; the last
        two stay on the host.

        With a model that takes images also the number of `images` of each text, and for each image `pixels` and
        `grids`, its patches in time, height and width; all on the host."""
        import torch

        tokens = np.concatenate([sample["tokens"] for sample in samples]).astype("<i4")
        lengths = np.concatenate([sample["lengths"] for sample in samples]).astype(np.int64)
        pieces = np.split(tokens, np.cumsum(lengths)[:-1])
        digests = [hashlib.blake2b(piece.tobytes(), digest_size=8) for piece in pieces]
        seen = self._see(samples, pieces, digests) if "images" in samples[0] else {}
        keys = b"".join(digest.digest() for digest in digests)
        return {
            "tokens": torch.from_numpy(tokens.astype(np.int64)),
            "lengths": lengths,
            "texts": np.array([len(sample["lengths"]) for sample in samples], dtype=np.int64),
            "label": torch.from_numpy(np.concatenate([sample["label"] for sample in samples]).astype(np.float64)),
            "keys": torch.from_numpy(np.frombuffer(keys, dtype="<i8").astype(np.int64)),
            **seen,
        }

    def _see(self, samples: Sequence[Features], pieces: Sequence[np.ndarray], digests: Sequence[Any]) -> dict[str, Any]:
        """The images of a batch; adds each image to the digest of its text."""
        vision = self._vision
        pixels, grids = [], []
        images = [image for sample in samples for image in stored_in(sample)]
        for image, piece, digest in zip(images, pieces, digests, strict=True):
            if image is None:
                continue
            name, encoded, picture = read_again(image[0], is_file=image[1], root=self.settings.image_root)
            digest.update(hashlib.blake2b(encoded).digest())
            patches, grid = vision.pixels(picture)
            then, now = int((piece == vision.image_token_id).sum()), int(grid.prod()) // vision.merge**2
            if now != then:
                raise DataError(
                    f"{name} has changed since it was encoded: it takes {now:,} tokens now, {then:,} then. Put the "
                    "old one back, or delete the folder of data.cache to encode the data again."
                )
            pixels.append(patches)
            grids.append(grid)
        return {
            "images": np.concatenate([sample["images"] for sample in samples]).astype(np.int64),
            "pixels": pixels,
            "grids": np.array(grids, dtype=np.int64).reshape(-1, 3),
        }


def _takes_images(processor: Any) -> bool:
    return hasattr(processor, "image_tokens")


def _refuse_images(pair: Pair, why: str) -> None:
    if pair.images:
        columns = dict.fromkeys(image.column.partition("[")[0] for image in pair.images)
        asked = " and ".join(map(repr, columns))
        raise DataError(
            f"{asked} in the record asks for images; {why}, or remove the column, and give texts in 'query', "
            f"'positive' and 'negatives', or name their columns in {MAPPING}."
        )


def _check_mode(pair: Pair, mode: str) -> None:
    query, document = mode.split("2")
    names = ["query", "positive", *["negative"] * (len(pair.entries) - 2)]
    for at, (name, entry) in enumerate(zip(names, pair.entries, strict=True)):
        wanted = document if at else query
        if entry.kind == wanted:
            continue
        fix = "Fix the record, or set it to null to take each record by its columns."
        if (entry.kind, wanted) == ("t", "i"):
            role = f"{name}_image{'s' if at > 1 else ''}"
            fix = f"Where {entry.column!r} holds images, set {MAPPING} = {{{role}: {entry.column}}}."
        sides = ", ".join(f"{side} {KINDS[e.kind]}" for side, e in zip(names[:2], pair.entries[:2], strict=True))
        raise DataError(
            f"the record is {pair.mode} ({sides}) and its {name} is {KINDS[entry.kind]}, but data.encode.mode = "
            f"{mode} requires {KINDS[wanted]} there. {fix}"
        )


def _tokenise(texts: list[str], tokenizer: Any, *, length: int) -> list[tuple[list[int], bool]]:
    """The tokens of each text with the tokenizer's special tokens, and whether the text was cut to `length`."""
    special = tokenizer.num_special_tokens_to_add()
    if length <= special:
        raise RecipeError(
            f"data.sequence_length = {length} leaves no room for text: the tokenizer adds {special} special tokens to "
            f"each. Set at least {special + 1}."
        )
    settings = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    # Cut by the tokenizer, which keeps the special token at the end.
    tokenised = tokenizer(texts, truncation=True, max_length=length, **settings)["input_ids"]
    full = [at for at, ids in enumerate(tokenised) if len(ids) == length]
    whole = tokenizer([texts[at] for at in full], **settings)["input_ids"] if full else []
    cut = {at for at, ids in zip(full, whole, strict=True) if len(ids) > length}
    for text, ids in zip(texts, tokenised, strict=True):
        if not ids:
            raise DataError(f"the tokenizer gives no token for the text {text[:40]!r}. Remove the record.")
    return [(ids, at in cut) for at, ids in enumerate(tokenised)]


def _features(tokenised: list[tuple[list[int], bool]], label: float) -> Features:
    return {
        "tokens": np.concatenate([np.array(ids, dtype=np.int32) for ids, _ in tokenised]),
        "lengths": np.array([len(ids) for ids, _ in tokenised], dtype=np.int32),
        "label": np.array([label], dtype=np.float64),
    }


def _encoded(tokenised: list[tuple[list[int], bool]], label: float, images: Features | None = None) -> Encoded:
    return Encoded([_features(tokenised, label) | (images or {})], truncated=any(cut for _, cut in tokenised))


__all__ = ["Pairs"]
