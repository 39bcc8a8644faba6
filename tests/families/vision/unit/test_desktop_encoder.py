"""Episodes of a desktop as samples: event tokens and screens, only actions learned, and exact on the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.contracts.data import IGNORE
from fullshard.families.vision.desktop.episodes import read_episode
from fullshard.families.vision.desktop.events import Key, Mouse, RawMouse
from fullshard.families.vision.desktop.formats import FORMATS, FormatName
from fullshard.families.vision.encoders.desktop import Desktop
from fullshard.families.vision.models.vlm import Vlm
from fullshard.families.vision.sources.desktop_episodes import DesktopEpisodes
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
