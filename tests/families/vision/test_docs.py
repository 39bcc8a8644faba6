"""The page of vision-language models: its recipe decodes, and its line of data is encoded as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import yaml
from PIL import Image
from typer.testing import CliRunner

import fullshard
from fullshard.cli import app
from fullshard.families.vision.desktop.episodes import Episodes, read_episode
from fullshard.families.vision.desktop.events import Screen
from fullshard.families.vision.desktop.rows import events_of
from fullshard.families.vision.desktop.screens import load
from fullshard.families.vision.desktop.transcript import words
from fullshard.families.vision.encoders.desktop import Desktop
from fullshard.families.vision.encoders.image_chat import ImageChat
from fullshard.families.vision.models.vlm import Vlm
from fullshard.multimodal.towers import Tower
from tests.families.vision.small import model_folder

FOLDER = Path(fullshard.__file__).parent / "families" / "vision"
PAGE = (FOLDER / "README.md").read_text()


def block(language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)[0]


def test_the_recipes_decode() -> None:
    for text in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL):
        recipe = fullshard.read(yaml.safe_load(text))
        assert recipe.model.kind() == "vlm"
        assert recipe.data.encode is not None


def test_the_line_of_data_is_encoded(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "cat.png")
    folder = model_folder(tmp_path / "model", "llava")
    processor = Vlm(path=str(folder)).load_processor(folder, where="model.path")
    encoder = ImageChat(image_root=tmp_path).open(processor, length=256)
    [sample] = encoder.encode(json.loads(block("json"))).samples
    assert sample["image_counts"].tolist() == [1]


def test_every_key_of_a_tower_is_explained() -> None:
    table = PAGE[PAGE.index("| key of a tower") : PAGE.index("Parts of a vision encoder")]
    assert set(re.findall(r"^\| `(\w+):", table, flags=re.MULTILINE)) == set(Tower.model_fields)


def test_the_transcript_is_what_the_command_prints() -> None:
    """Of a smaller set of episodes: the first sample is the same."""
    command, *expected = re.findall(r"```text\n\$ (.*?)```", PAGE, flags=re.DOTALL)[0].rstrip().splitlines()
    assert command == "fullshard check desktop --sample 0"
    few = ["data.train.episodes=1", "data.validation.episodes=1"]
    result = CliRunner().invoke(app, [*command.split()[1:], *few], catch_exceptions=False)
    assert without_sizes(result.stdout.rstrip()) == without_sizes("\n".join(expected))


def without_sizes(text: str) -> str:
    """Without the number of samples, and the size of a PNG, which depends on the version of zlib."""
    return re.sub(r"(?<=of )[\d,]+(?=, from)|\d+(?= bytes)", "N", text)


SHOWN = {0: "move 8 down", 3: "button down", 4: "button up", 5: "8 left, 8 up", 10: "press B", 11: "release B"}
"""Actions of an episode in the picture, by their number, and what they are."""


def test_the_picture_is_what_the_recipe_draws() -> None:
    records = Episodes(fullshard.read("desktop").data.train.open())
    events = read_episode(records[2]).events
    assert all(words(events[2 * at + 1]).endswith(said) for at, said in SHOWN.items())
    drawn = Image.new("RGB", (6 * 136 - 8, 128), "white")
    for column, at in enumerate(SHOWN):
        screen = events[2 * at]
        assert isinstance(screen, Screen)
        assert screen.image is not None
        shown = load(screen.image, root=None).resize((128, 128), Image.Resampling.NEAREST)
        drawn.paste(shown, (column * 136, 0))
    with Image.open(FOLDER / "desktop.png") as stored:
        apart = np.abs(np.asarray(stored.convert("RGB"), dtype=float) - np.asarray(drawn, dtype=float))
    assert apart.mean() < 1  # letters may be smoothed otherwise by another version of Pillow


def test_every_key_of_the_desktop_encoder_is_explained() -> None:
    table = PAGE[PAGE.index("| key of `data.encode`") : PAGE.index("A window holds whole events")]
    assert set(re.findall(r"^\| `(\w+)", table, flags=re.MULTILINE)) == set(Desktop.model_fields)


def test_the_rows_of_a_recording_are_read() -> None:
    rows = [json.loads(line) for line in re.findall(r"^{\"episode_path.*$", PAGE, flags=re.MULTILINE)]
    assert [words(event) for row in rows for event in events_of(row)] == ["screen", "press A"]
