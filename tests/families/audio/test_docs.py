"""The page of audio language models: its recipes decode, its line of data is encoded, and its tables are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import soundfile
import yaml

import fullshard
from fullshard.families.audio.encoders.audio_chat import AudioChat
from fullshard.families.audio.models.audio_lm import AudioLM
from fullshard.hf.adapters.settings import PRESETS
from fullshard.multimodal.towers import Tower
from tests.families.audio.small import RATE, model_folder, tone

PAGE = (Path(fullshard.__file__).parent / "families" / "audio" / "README.md").read_text()


def test_the_recipes_decode() -> None:
    for text in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL):
        recipe = fullshard.read(yaml.safe_load(text))
        assert recipe.model.kind() == "audio_lm"
        assert recipe.data.encode is not None


def test_the_line_of_data_is_encoded(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "hello.wav", tone(1), RATE)
    folder = model_folder(tmp_path / "model", "qwen2_audio")
    processor = AudioLM(path=str(folder)).load_processor(folder, where="model.path")
    [line] = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    [sample] = AudioChat(audio_root=tmp_path).open(processor, length=256).encode(json.loads(line)).samples
    assert sample["audio_seconds"].tolist() == [0.5]


def test_the_tables_are_complete() -> None:
    table = PAGE[PAGE.index("| key of a tower") : PAGE.index("What audio never reaches")]
    assert set(re.findall(r"^\| `(\w+):", table, flags=re.MULTILINE)) == set(Tower.model_fields)
    rows = {
        row[0]: list(map(float, row[1:]))
        for row in re.findall(r"^\| `(\w+_r\d+)` \| (\d+) \| (\d+) \| (.+?) \|", PAGE, re.M)
    }
    assert rows == {name: [*preset.values()] for name, preset in PRESETS.items()}
