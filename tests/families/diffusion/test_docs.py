"""The page of diffusion models: its recipe trains as written, its commands run, and every setting in it decodes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fullshard
from fullshard.cli import app

PAGE = (Path(fullshard.__file__).parent / "families" / "diffusion" / "README.md").read_text()
[RECIPE] = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


[SAMPLE] = re.findall(r"^fullshard (sample .*)$", PAGE, flags=re.MULTILINE)


def test_the_recipe_trains_and_is_sampled_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits.yaml").write_text(RECIPE)
    short = ("duration.steps=2", "duration.epochs=null", "topology.device=cpu", "topology.devices=1", "log.sinks=[]")
    result = fullshard.train(fullshard.read(tmp_path / "digits.yaml", *short, f"output={tmp_path}"))
    assert (result.step, result.stopped) == (2, "done")
    assert 0 < result.validation["loss"] < 10
    assert (tmp_path / "digits" / "pictures" / "samples-2.png").is_file()
    assert (tmp_path / "digits" / "model" / "diffusion_pytorch_model.safetensors").is_file()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(tmp_path)
    done = CliRunner().invoke(app, shlex.split(SAMPLE), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out.png").is_file()


def test_every_setting_decodes(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text(RECIPE)
    found = re.findall(
        r"`((?:data\.|evaluate\.|checkpoint\.|model\.|ema|optimizer|schedule)[\w.]*): ([^`]+)`",
        re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL),
    )
    assert len(found) == 14
    for key, value in found:
        fullshard.read(tmp_path / "digits.yaml", f"{key}={value}")
    for value in ("{kind: flow_matching, time: uniform, integer_time: true, loss: l1_loss, label_drop: 0.2}",):
        fullshard.read(tmp_path / "digits.yaml", f"objective={value}")
    for prediction in ("epsilon", "v"):
        for betas in ("linear", "cosine"):
            ddpm = f"objective={{kind: ddpm, prediction: {prediction}, betas: {betas}, min_snr: 5}}"
            fullshard.read(tmp_path / "digits.yaml", ddpm)
