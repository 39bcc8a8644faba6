"""The page of audio language models: its recipes decode, its line of data is encoded, and its tables are complete."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import soundfile
import yaml
from typer.testing import CliRunner

import fullshard
from fullshard.cli import app
from fullshard.families.audio.encoders.audio_chat import AudioChat
from fullshard.families.audio.models.audio_lm import AudioLM
from fullshard.hf.adapters.settings import PRESETS
from fullshard.multimodal.towers import Tower
from tests.families.audio.small import RATE, model_folder, tone

PAGE = (Path(fullshard.__file__).parent / "families" / "audio" / "README.md").read_text()
GUIDE = (Path(fullshard.__file__).parents[1] / "docs" / "audio.md").read_text()


def test_the_recipes_decode() -> None:
    for text in re.findall(r"```yaml\n(.*?)```", PAGE + GUIDE, flags=re.DOTALL):
        recipe = fullshard.read(yaml.safe_load(text))
        assert recipe.model.kind() == "audio_lm"
        assert recipe.data.encode is not None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_guide_work_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, with a small model in place of the large one."""
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model", "qwen2_audio")
    (tmp_path / "clips").mkdir()
    for number in range(40):
        soundfile.write(tmp_path / "clips" / f"{number}.wav", tone(number), RATE)
    soundfile.write(tmp_path / "hello.wav", tone(1), RATE)
    lines = [{"audio_path": f"{n}.wav", "prompt": "Which number?", "response": "one"} for n in range(40)]
    (tmp_path / "clips.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [recipe] = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)
    settings = yaml.safe_load(recipe.replace("Qwen/Qwen2-Audio-7B-Instruct", "model"))
    settings |= {"duration": {"steps": 2}, "topology": {"device": "cpu", "devices": 1}, "precision": "fp32"}
    (tmp_path / "my-audio.yaml").write_text(yaml.safe_dump(settings))
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE, flags=re.DOTALL)
    commands = [line for block in blocks[1:] for line in block.splitlines()]
    assert len(commands) == 6
    for line in commands:
        done = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
        assert done.exit_code == 0, f"{line}: {done.output}"
    assert (tmp_path / "merged" / "model.safetensors").is_file()


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
