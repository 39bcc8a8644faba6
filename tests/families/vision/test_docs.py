"""The page of vision-language models: its recipe decodes, and its line of data is encoded as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from PIL import Image

import fullshard
from fullshard.families.vision.encoders.image_chat import ImageChat
from fullshard.families.vision.models.vlm import Vlm
from fullshard.multimodal.towers import Tower
from tests.families.vision.small import model_folder

PAGE = (Path(fullshard.__file__).parent / "families" / "vision" / "README.md").read_text()


def block(language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)[0]


def test_the_recipes_decode() -> None:
    for text in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL):
        recipe = fullshard.load(yaml.safe_load(text))
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
