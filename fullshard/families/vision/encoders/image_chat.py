"""Conversations with images; only the answers are learned, never an image's own tokens.

Images are in parts of the messages or in the column `images`; they are read to the end when the data is encoded. Must
not know ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from fullshard.contracts.data import DropReason, Encoded, Features, Quantity, Record, Store
from fullshard.errors import DataError
from fullshard.families.vision import record_images as found_images
from fullshard.families.vision.image_samples import ImageCollator, image_passages, image_quantities, image_sample
from fullshard.families.vision.prefix_layout import moved_images, prefix_sample
from fullshard.images.reading import UNREADABLE, Picture, Unreadable, look_at
from fullshard.multimodal.media_chat import OpenMediaChat, TooLong
from fullshard.multimodal.parts import Medium
from fullshard.text.chat import FORMS, ChatEncoder
from fullshard.text.conversation import LISTS, Message
from fullshard.text.rendering import Rendered

TOO_LONG = DropReason(
    "with images that need more than data.sequence_length",
    "raise data.sequence_length, or make images smaller with model.max_pixels",
)


class ImageChat(ChatEncoder):
    """Conversations and question-answer pairs with images."""

    forms: ClassVar[str] = FORMS.replace("chat:", "image_chat, with parts of type image or a column images:", 1)

    packs_media: ClassVar[bool] = True

    image_root: Path | None = None
    """Where relative paths of images start; null: the working directory."""
    unreadable: Literal["error", "skip"] = "error"
    """An image that is missing or damaged stops the run, or its record is left out and counted."""
    too_long: Literal["error", "skip"] = "error"
    """The same for a record whose images do not fit into data.sequence_length."""
    allow_urls: bool = False
    """Download images that are given as http(s) URLs, when the data is encoded."""

    @staticmethod
    def accepts(record: Record) -> bool:
        return ChatEncoder.accepts(record) and bool(_images_of(record))

    def quantities(self, store: Store) -> list[Quantity]:
        return [*super().quantities(store), *image_quantities(store)]

    def open(self, processor: Any, *, length: int) -> OpenImageChat:
        return OpenImageChat(self, processor, length=length)

    def conversation(self, record: Record) -> list[Message]:
        return self.with_images(record)[0]

    def with_images(self, record: Record) -> tuple[list[Message], list[Any]]:
        """The messages, with an image part for each image, and the images in order."""
        plain = {key: found_images.text_only(record[key]) for key in LISTS if record.get(key) is not None}
        messages = [dict(message) for message in super().conversation({**record, **plain})]
        in_parts = [value for key in plain for value in found_images.part_images(record[key])]
        return messages, found_images.place_images(messages, in_parts, found_images.column_images(record))

    def texts(self, record: Record) -> list[str]:
        contents = [message.get("content") for message in self.conversation(record)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return [c for c in contents if isinstance(c, str)] + [part["text"] for part in parts if "text" in part]

    def variables(self, record: Record) -> dict[str, Any]:
        return {k: v for k, v in super().variables(record).items() if k not in found_images.COLUMNS}


def _images_of(record: Record) -> list[Any]:
    in_parts = [value for key in LISTS for value in found_images.part_images(record.get(key))]
    return [*in_parts, *found_images.image_columns(record)]


class OpenImageChat(OpenMediaChat):
    """Renders conversations, puts in the text of each image, and tokenizes them."""

    settings: ImageChat
    medium: ClassVar[Medium] = found_images.MEDIUM

    def __init__(self, settings: ImageChat, processor: Any, *, length: int) -> None:
        super().__init__(settings, processor, length=length)
        if processor.takes_suffix and settings.train_on == "all":
            raise DataError(
                f"data.encode.train_on = all: a model with {type(processor.whole).__name__} reads the question in both "
                "directions, so it cannot learn to predict it. Set data.encode.train_on: answers."
            )

    def chat_template(self) -> str:
        if self.processor.takes_suffix:
            return f"none, the prefix and suffix of {type(self.processor.whole).__name__}"
        return super().chat_template()

    def collator(self, store: Store) -> ImageCollator:
        return ImageCollator(self.settings, self.processor, root=self.settings.image_root, length=self.length)

    def passages(self, sample: Features) -> list[tuple[str, int]]:
        found, at = list[tuple[str, int]](), 0
        images = image_passages(sample, self.processor, root=self.settings.image_root, noun="image")
        for words, start, stop in images:
            found += [("", start - at), (words, stop - start)]
            at = stop
        return [(words, size) for words, size in [*found, ("", len(sample["input_ids"]) - at)] if size]

    def annotate_processor(self) -> None:
        if not self.processor.takes_suffix:
            super().annotate_processor()

    def _encode(self, record: Record) -> Encoded:
        messages, images = self.settings.with_images(record)
        try:
            pictures = self._read(images)
            if self.processor.takes_suffix:
                noted = ["an image after text; the model reads images first"] if moved_images(messages) else []
                tokens = prefix_sample(messages, pictures, self.processor)
                return self._fitted([tokens], [pictures], Rendered([], noted=noted))
            return self._sampled(self._rendered(messages, record), pictures)
        except (Unreadable, TooLong) as error:
            choice, why = self.settings.unreadable, UNREADABLE
            if isinstance(error, TooLong):
                choice, why = self.settings.too_long, TOO_LONG
            if choice == "error":
                raise
            return Encoded(dropped=[why])

    def _read(self, images: Sequence[Any]) -> list[Picture]:
        """Every image, read to its end."""
        urls = self.settings.allow_urls
        given = [found_images.read_given(value, n, allow_urls=urls) for n, value in enumerate(images, start=1)]
        pictures = look_at(given, root=self.settings.image_root, num_tokens=lambda width, height: 0)
        if damaged := next((picture for picture in pictures if isinstance(picture, Unreadable)), None):
            raise damaged
        return [picture for picture in pictures if isinstance(picture, Picture)]

    def _texts_of(self, media: Sequence[Picture]) -> list[str]:
        return list(self.processor.image_texts([picture.size for picture in media]))

    def _sample(self, tokens: Features, media: Sequence[Picture]) -> Features:
        return image_sample(tokens, media, self.processor, length=self.length)


__all__ = ["ImageChat"]
