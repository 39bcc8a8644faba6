"""Episodes of a desktop as samples: event tokens and screens, only actions learned, and exact on the way back."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from fullshard.contracts.data import IGNORE, Encoded
from fullshard.families.vision.desktop.episodes import read_episode
from fullshard.families.vision.desktop.events import Key, Mouse, RawMouse
from fullshard.families.vision.desktop.formats import FORMATS, FormatName
from fullshard.families.vision.encoders.desktop import Desktop
from fullshard.families.vision.models.vlm import Vlm
from fullshard.families.vision.sources.desktop_episodes import DesktopEpisodes
from tests.families.vision.desktop.samples import KEY, listed, row
from tests.families.vision.small import model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("desktop") / "model", "llava")


def opened(folder: Path, length: int = 512, **settings: Any) -> tuple[Desktop, Any]:
    encoder = Desktop(**settings)
    processor = Vlm(path=str(folder)).load_processor(folder, where="model.path")
    processor.tokenizer.add_tokens(encoder.added_tokens(), special_tokens=True)
    return encoder, encoder.open(processor, length=length)


@pytest.mark.parametrize("name", ["factorized", "hierarchical", "json"])
def test_what_is_learned_is_every_action_and_decodes_exactly(folder: Path, name: FormatName) -> None:
    settings, encoder = opened(folder, length=1024, format=name)
    records = settings.arranged(DesktopEpisodes(episodes=2).open())
    form, tokenizer = FORMATS[name], encoder.processor.tokenizer
    for index in range(len(records)):
        learned = [token for s in encoder.encode(records[index]).samples for token in s["labels"] if token != IGNORE]
        text = tokenizer.decode(learned, skip_special_tokens=False)
        events = read_episode(records[index]).events
        actions = [made for e in events if isinstance(e, (Key, Mouse, RawMouse)) for made in form.rounded(e)]
        assert form.decode(text) == actions


def test_windows_fit_and_their_images_are_those_of_the_tokens(folder: Path) -> None:
    settings, encoder = opened(folder, length=128)
    records = settings.arranged(DesktopEpisodes(episodes=3).open())
    samples = [sample for index in range(3) for sample in encoder.encode(records[index]).samples]
    assert len(samples) > 3
    per_image = len(encoder.processor.tokenizer(encoder.processor.image_texts([(64, 64)])[0])["input_ids"])
    for sample in samples:
        tokens = int((sample["input_ids"] == encoder.processor.image_token_id).sum())
        assert len(sample["input_ids"]) <= 128
        assert tokens == int(sample["image_counts"][0]) * per_image


def test_the_blank_row_has_no_loss(folder: Path) -> None:
    settings, encoder = opened(folder)
    record = settings.arranged(DesktopEpisodes(episodes=1).open())[0]
    [sample, *_] = encoder.encode(record).samples
    collator = encoder.collator(None)
    text = collator.without_media(sample)
    assert encoder.processor.image_token_id not in text["input_ids"]
    assert (collator.blank(sample)["labels"] == IGNORE).all()
    rows = collator.touching([text])
    assert len(rows) == 2
    assert (rows[1]["labels"] == IGNORE).all()
    batch = collator.collate(rows, length=None)
    assert np.all(batch["labels"][1].numpy() == IGNORE)
    assert "media.pixel_values" in batch


def encoded(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> tuple[Any, Encoded]:
    encoder, open_encoder = opened(folder, **settings)
    return open_encoder, open_encoder.encode(encoder.arranged(listed(rows))[0])


def test_screens_are_files_bytes_data_uris_or_frames_of_a_video(folder: Path, tmp_path: Path) -> None:
    picture = Image.new("RGB", (32, 32), (40, 120, 200))
    picture.save(tmp_path / "one.png")
    content = (tmp_path / "one.png").read_bytes()
    with av.open(str(tmp_path / "clip.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=10, width=32, height=32, pix_fmt="bgr0")
        for shown in (Image.new("RGB", (32, 32)), picture):
            container.mux(stream.encode(av.VideoFrame.from_image(shown)))
        container.mux(stream.encode())
    uri = f"data:image/png;base64,{b64encode(content).decode()}"
    media = [{"uri": "one.png"}, {"uri": uri}, {"uri": "clip.mkv", "pts_ns": 100_000_000}]
    screens = [row("ScreenCaptured", content), *(row("ScreenCaptured", {"media_ref": one}) for one in media)]
    rows = [*screens, row("KeyboardEvent", KEY, 1)]
    encoder, found = encoded(folder, rows, image_root=tmp_path)
    [sample] = found.samples
    pixels = encoder.collator(None).collate([sample], length=None)["media.pixel_values"]
    assert len(pixels) == 4
    assert all((one == pixels[0]).all() for one in pixels)
    said = [words.split("  ")[-1] for words, _ in encoder.passages(sample) if "screen" in words]
    of_bytes = f"[screen 32x32 from {len(content)} bytes in the record]"
    frame = "[screen 32x32 from clip.mkv at 0.100 s]"
    assert said == [of_bytes, "[screen 32x32 from one.png]", of_bytes, frame]


def test_a_window_without_a_screen_is_skipped_and_counted_or_kept(folder: Path) -> None:
    rows = [row("KeyboardEvent", KEY, time) for time in range(3)]
    _, skipped = encoded(folder, rows)
    assert not skipped.samples
    assert [drop.reason for drop in skipped.dropped] == ["without a screen"]
    _, kept = encoded(folder, rows, without_image="keep")
    assert len(kept.samples) == 1
    assert not kept.dropped


def test_events_that_are_too_long_are_counted(folder: Path) -> None:
    title = row("WindowInfo", {"title": "long " * 200}, 1)
    screen = DesktopEpisodes(episodes=1).open()[0]["message"]
    rows = [row("ScreenCaptured", screen), title, title, row("KeyboardEvent", KEY, 2)]
    _, found = encoded(folder, rows, format="json", use_info=True, length=300)
    assert len(found.samples) == 1
    assert [drop.reason for drop in found.dropped] == ["with an event too long for a window"] * 2
    _, without = encoded(folder, rows, format="json", length=300)
    assert list(without.noted) == ["WindowInfo messages that are left out"]


def test_a_shift_lets_the_model_see_later_screens(folder: Path) -> None:
    screen = DesktopEpisodes(episodes=1).open()[0]["message"]
    rows = [row("ScreenCaptured", screen), row("KeyboardEvent", KEY, 10), row("ScreenCaptured", screen, 50_000_000)]
    for shift, expected in ((0, ["screen", "press A", "screen"]), (100, ["screen", "screen", "press A"])):
        encoder, found = encoded(folder, rows, action_shift_ms=shift)
        said = [words.split("  ")[-1] for words, _ in encoder.passages(found.samples[0])]
        assert ["screen" if "[screen" in one else one for one in said[1:-1]] == expected
