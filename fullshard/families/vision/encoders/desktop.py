"""Recordings of a desktop: screens, keys and mouse as event tokens and images; the loss is on actions only.

Rows of a source become whole episodes, and episodes become windows of at most `data.sequence_length` tokens, the
samples. Rows may also hold windows that were tokenised elsewhere. Must not know ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from fullshard.contracts.data import (
    DropReason,
    Encoded,
    Encoder,
    Features,
    OpenEncoder,
    Quantity,
    Record,
    Records,
    Store,
)
from fullshard.errors import DataError
from fullshard.families.vision.desktop.episodes import Episodes, read_episode
from fullshard.families.vision.desktop.events import ImageRef
from fullshard.families.vision.desktop.formats import FORMATS, FormatName
from fullshard.families.vision.desktop.rows import form_of, tokenised
from fullshard.families.vision.desktop.screens import given, located
from fullshard.families.vision.desktop.spans import learned
from fullshard.families.vision.desktop.transcript import passages
from fullshard.families.vision.desktop.windows import NO_IMAGE, TOO_LONG, Image, Window, cut
from fullshard.families.vision.image_samples import (
    ImageCollator,
    image_passages,
    image_quantities,
    image_sample,
    image_spans,
)
from fullshard.formatting.plural import counted
from fullshard.images.reading import UNREADABLE, Picture, Unreadable, look_at
from fullshard.text.tokens import shifted

NO_ACTION = DropReason("with no action to learn", "raise data.sequence_length, or give recordings with actions")
NO_SCREEN = DropReason(NO_IMAGE, "set data.encode.without_image = keep to train on windows without a screen")
EVENT_TOO_LONG = DropReason(
    "with an event too long for a window",
    "raise data.sequence_length above the tokens of a screen or event, or make screens smaller (model.max_pixels)",
)


class Desktop(Encoder):
    """Episodes of screen, keyboard and mouse events."""

    forms: ClassVar[str] = (
        'desktop: {"episode_path": "...", "topic": "...", "timestamp_ns": 0, "message_type": "...", "message": {...}}, '
        '{"episode_path": "...", "bin_idx": 0, "timestamp_ns": 0, "state": [...], "actions": [...]}, or '
        '{"episode_path": "...", "input_ids": [...], "attention_mask": [...], "images": [...]}'
    )
    packs_media: ClassVar[bool] = True

    format: FormatName = "factorized"
    """How events become tokens: factorized (digits), hierarchical (coarse to fine) or json (plain text)."""
    image_root: Path | None = None
    """Where relative paths of screens and videos start; null: the working directory."""
    unreadable: Literal["error", "skip"] = "error"
    """A screen that is missing or damaged stops the run, or its episode is left out and counted."""
    without_image: Literal["keep", "skip"] = "skip"
    """Keep or skip windows without a screen."""
    action_shift_ms: int = 0
    """Added to the time of every action: a positive number lets the model see later screens before it acts."""
    use_info: bool = False
    """Include the state of windows; needs format: json."""

    def arranged(self, records: Records) -> Records:
        return Episodes(records)

    def added_tokens(self) -> list[str]:
        return list(FORMATS[self.format].vocabulary())

    def texts(self, record: Record) -> list[str]:
        form = FORMATS[self.format]
        if self.format != "json" or _is_finished(record):
            return ["desktop"]  # events have their own tokens, or are tokenised already
        return [form.encode(event) for event in read_episode(record, image_root=self.image_root).events]

    def quantities(self, store: Store) -> list[Quantity]:
        return [*super().quantities(store), *image_quantities(store)]

    def open(self, processor: Any, *, length: int) -> OpenDesktop:
        return OpenDesktop(self, processor, length=length)


class OpenDesktop(OpenEncoder):
    """Turns episodes into windows of tokens and screens."""

    settings: Desktop

    def encode(self, record: Record) -> Encoded:
        if _is_finished(record):
            return self._finished(record)
        settings, form = self.settings, FORMATS[self.settings.format]
        episode = read_episode(record, image_root=settings.image_root)
        pictures: dict[ImageRef, Picture] = {}
        try:
            found = cut(
                episode,
                form,
                length=self.length,
                count_tokens=lambda text: len(self._tokens(text)),
                image_tokens=lambda ref: len(self._image_tokens([self._picture(ref, pictures)])[0]),
                without_image=settings.without_image,
                action_shift_ns=settings.action_shift_ms * 1_000_000,
                use_info=settings.use_info,
            )
        except Unreadable:
            if settings.unreadable == "error":
                raise
            return Encoded(dropped=[UNREADABLE])
        kept = [window for window in found.windows if window.learned]
        samples = [self._sample(window, pictures) for window in kept]
        dropped = [NO_ACTION] * (len(found.windows) - len(kept)) + [NO_SCREEN] * found.skipped[NO_IMAGE]
        dropped += [EVENT_TOO_LONG] * found.events.pop(TOO_LONG, 0)
        return Encoded(samples, dropped=dropped, noted=[*found.events])

    def _finished(self, record: Record) -> Encoded:
        """Rows that hold windows."""
        samples, dropped = list[Features](), list[DropReason]()
        for row, where in zip(record["rows"], record["places"], strict=True):
            try:
                found = self._window(row)
            except DataError as error:
                if isinstance(error, Unreadable) and self.settings.unreadable == "skip":
                    dropped.append(UNREADABLE)
                    continue
                raise type(error)(f"{Path(where).name}: {error}") from error
            if isinstance(found, DropReason):
                dropped.append(found)
            else:
                samples.append(found)
        return Encoded(samples, dropped=dropped)

    def _window(self, row: Record) -> Features | DropReason:
        """A window that was tokenised elsewhere, checked, with the same loss as one made here."""
        window, root = tokenised(row), self.settings.image_root
        ids, tokenizer = np.array(window.input_ids, dtype=np.int32), self.processor.tokenizer
        if ids.max() >= len(tokenizer):
            raise DataError(
                f"'input_ids' has {ids.max():,}, but the tokenizer has the ids 0 to {len(tokenizer) - 1:,}. Tokenise "
                "with the tokenizer of this model and the tokens of data.encode.format."
            )
        if len(ids) > self.length:
            raise DataError(
                f"'input_ids' has {counted(len(ids), 'token')}, but data.sequence_length = {self.length:,}. Raise it."
            )
        known: dict[ImageRef, Picture] = {}
        refs = [located(ref, root=root, episode_path=window.episode_path) for ref in window.images]
        pictures = [self._picture(ref, known) for ref in refs]
        if not pictures and self.settings.without_image == "skip":
            return NO_SCREEN
        places = image_spans(ids, [picture.size for picture in pictures], self.processor)
        covered = {at for start, stop in places for at in range(start, stop)}
        marks = learned(ids.tolist(), tokenizer, FORMATS[self.settings.format], pictures=covered)
        if not marks.any():
            return NO_ACTION
        tokens = {"input_ids": ids, "labels": shifted(ids, marks)}
        return image_sample(tokens, pictures, self.processor, length=self.length)

    def collator(self, store: Store) -> ImageCollator:
        return ImageCollator(self.settings, self.processor, root=self.settings.image_root, length=self.length)

    def passages(self, sample: Features) -> list[tuple[str, int]]:
        screens = image_passages(sample, self.processor, root=self.settings.image_root, noun="screen")
        return [
            *passages(sample["input_ids"].tolist(), self.processor.tokenizer, FORMATS[self.settings.format], screens)
        ]

    def _sample(self, window: Window, pictures: dict[ImageRef, Picture]) -> Features:
        shown = [pictures[ref] for ref in window.images]
        of_images = iter(self._image_tokens(shown))
        pieces = [
            (next(of_images), False) if isinstance(segment, Image) else (self._tokens(segment.text), segment.trained)
            for segment in window.segments
        ]
        ids = np.array([token for tokens, _ in pieces for token in tokens], dtype=np.int32)
        marks = np.repeat([trained for _, trained in pieces], [len(tokens) for tokens, _ in pieces])
        tokens = {"input_ids": ids, "labels": shifted(ids, marks)}
        return image_sample(tokens, shown, self.processor, length=self.length)

    def _picture(self, ref: ImageRef, known: dict[ImageRef, Picture]) -> Picture:
        if ref not in known:
            root = self.settings.image_root
            [found] = look_at([given(ref, root=root)], root=root, num_tokens=lambda width, height: 0)
            if isinstance(found, Unreadable):
                raise found
            known[ref] = found
        return known[ref]

    def _image_tokens(self, pictures: Sequence[Picture]) -> list[list[int]]:
        texts = self.processor.image_texts([picture.size for picture in pictures]) if pictures else []
        return [self._tokens(text) for text in texts]

    def _tokens(self, text: str) -> list[int]:
        return list(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])


def _is_finished(record: Record) -> bool:
    """Whether an episode comes as windows that were tokenised elsewhere."""
    return form_of(record["rows"][0]) == "tokenised"


__all__ = ["Desktop"]
