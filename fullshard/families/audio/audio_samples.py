"""Samples of tokens and clips: what is stored of each, and their micro-batches.

A sample keeps its clips as paths or bytes; the loader's workers decode them and make features for each micro-batch.
Must not know conversations, files of records or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.contracts.data import IGNORE, Collator, Encoder, Features, Quantity, Store
from fullshard.families.audio.processor import AudioProcessor
from fullshard.families.audio.reading import Clip, read_again, recorded
from fullshard.formatting.plural import counted
from fullshard.multimodal.media_chat import TooLong
from fullshard.multimodal.objective import MEDIA
from fullshard.text.tokens import collate_tokens

_OF_CLIPS = ("audio_sizes", "audio_files", "audio_data", "audio_seconds")


def audio_sample(tokens: Features, clips: Sequence[Clip], processor: AudioProcessor, *, length: int) -> Features:
    """The features of one sample: its tokens, cut to `length` after the last clip, and its clips."""
    ids = tokens["input_ids"]
    places = np.flatnonzero(ids == processor.audio_token_id)
    if len(places) and places[-1] >= length:
        raise TooLong(
            f"{counted(len(clips), 'clip')} and the text before the end of the last of them take "
            f"{counted(int(places[-1]) + 1, 'token')}, but data.sequence_length = {length:,}. Raise it, give fewer or "
            "shorter clips, or set data.encode.too_long = skip to leave such records out."
        )
    return {
        "input_ids": ids[:length],
        "labels": tokens["labels"][:length],
        "audio_sizes": np.array([len(clip.data) for clip in clips], dtype=np.int64),
        "audio_files": np.array([clip.is_file for clip in clips], dtype=bool),
        "audio_seconds": np.array([clip.samples / processor.rate for clip in clips], dtype=np.float32),
        "audio_data": np.frombuffer(b"".join(clip.data for clip in clips), dtype=np.uint8),
    }


def audio_quantities(store: Store) -> list[Quantity]:
    """Clips and seconds of audio of each sample."""
    clips = store.sizes("audio_sizes")
    ends = np.cumsum(clips)
    total = np.concatenate([[0.0], np.cumsum(store.flat("audio_seconds"), dtype=np.float64)])
    return [Quantity("clips", "clips", clips), Quantity("audio_seconds", "s audio", total[ends] - total[ends - clips])]


class AudioCollator(Collator):
    """Pads tokens, and decodes and processes the clips of each micro-batch."""

    media_feature: str | None = "audio_sizes"

    def __init__(self, settings: Encoder, processor: AudioProcessor, *, root: Path | None) -> None:
        super().__init__(settings)
        self._processor, self._root = processor, root

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        batch = collate_tokens(samples, length=length)
        if clips := [clip for sample in samples for clip in self.clips(sample)]:
            batch |= {f"{MEDIA}{name}": value for name, value in self._processor.features(clips).items()}
        return batch

    def blank(self, sample: Features) -> Features:
        # Without audio: a rank with nothing but fillers must not run a tower that no other rank runs.
        return super().blank(self.without_media(sample))

    def touching(self, samples: Sequence[Features]) -> Sequence[Features]:
        """The samples; if no sample has a clip, also a row with one that adds nothing to the loss."""
        return samples if any(len(sample["audio_sizes"]) for sample in samples) else [*samples, self._silence]

    def without_media(self, sample: Features) -> Features:
        text = sample["input_ids"] != self._processor.audio_token_id
        text[-1] |= not text.any()  # a row has at least one token
        size = len(text)
        kept = {name: array[text] for name, array in sample.items() if name not in _OF_CLIPS and len(array) == size}
        kept["labels"] = np.where(kept["labels"] == self._processor.audio_token_id, IGNORE, kept["labels"])
        return {**kept, **{name: sample[name][:0] for name in _OF_CLIPS}}

    def clips(self, sample: Features) -> list[np.ndarray]:
        """The decoded clips of a row."""
        rate = self._processor.rate
        return [read_again(data, is_file=is_file, root=self._root, rate=rate) for data, is_file in stored_clips(sample)]

    @cached_property
    def _silence(self) -> Features:
        """A sample with a short silent clip, of which nothing is learned."""
        from fullshard.families.audio.reading import given, look_at

        rate = self._processor.rate
        silence = np.zeros(rate // 10, dtype=np.float32)
        [clip] = look_at([given(silence, "silence", rate=rate)], root=None, rate=rate)
        assert isinstance(clip, Clip)
        text = self._processor.clip_text(clip.samples)
        ids = np.array(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        labels = np.full(len(ids), IGNORE, dtype=np.int32)
        return audio_sample({"input_ids": ids, "labels": labels}, [clip], self._processor, length=max(len(ids), 1))


def stored_clips(sample: Features) -> list[tuple[bytes, bool]]:
    """The clips of a sample: a path or the bytes of a file, and whether it is a path."""
    ends = np.cumsum(sample["audio_sizes"])
    data = [
        sample["audio_data"][end - size : end].tobytes() for end, size in zip(ends, sample["audio_sizes"], strict=True)
    ]
    return list(zip(data, map(bool, sample["audio_files"]), strict=True))


def clip_passages(sample: Features, processor: AudioProcessor, *, root: Path | None) -> list[tuple[str, int]]:
    """A sample in parts for a person to read: what each clip is, and the tokens from its first to its last; a clip of a
    speech encoder-decoder has none."""
    found, at, seen = list[tuple[str, int]](), 0, 0
    places = np.flatnonzero(sample["input_ids"] == processor.audio_token_id)
    for number, (data, is_file) in enumerate(stored_clips(sample), start=1):
        samples = len(read_again(data, is_file=is_file, root=root, rate=processor.rate))
        size = _audio_tokens(processor, samples) if processor.clip_tokens else 0
        mine, seen = places[seen : seen + size], seen + size
        start, stop = (int(mine[0]), int(mine[-1]) + 1) if size else (at, at)
        heard = f"{samples / processor.rate:.2f} s{_as_recorded(data, is_file, root, processor.rate)}"
        origin = data.decode() if is_file else f"{counted(len(data), 'byte')} in the record"
        tokens = f", {counted(size, 'token')}" if size else ""
        found += [("", start - at), (f"[clip {number}: {heard} from {origin}{tokens}]", stop - start)]
        at = stop
    return [(words, size) for words, size in [*found, ("", len(sample["input_ids"]) - at)] if size or words]


def _audio_tokens(processor: AudioProcessor, samples: int) -> int:
    """The tokens of a clip that the tower's vectors replace."""
    ids = processor.tokenizer(processor.clip_text(samples), add_special_tokens=False)["input_ids"]
    return int(list(ids).count(processor.audio_token_id))


def _as_recorded(data: bytes, is_file: bool, root: Path | None, rate: int) -> str:
    """Rate and channels of a clip, and what became of them."""
    own, channels = recorded(data, is_file=is_file, root=root)
    mixed = f", {counted(channels, 'channel')} mixed to one" if channels > 1 else ""
    return f", {own:,} Hz{f' resampled to {rate:,} Hz' if own != rate else ''}{mixed},"


__all__ = ["AudioCollator", "audio_quantities", "audio_sample", "clip_passages"]
