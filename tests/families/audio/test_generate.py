"""`fullshard generate --audio`: token by token what Transformers generates with the exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fullshard.cli import app
from tests.families.audio.small import MODELS, loaded, model_folder, processed, settings, write_records
from tests.ranks import RankPool
from tests.slow import only_first
from tests.small import train

TOKENS = 6


def command(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [*words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@torch.no_grad()
def by_transformers(folder: Path, model: Path) -> tuple[str, list[str], list[int]]:
    """Question, clips and the answer of Transformers for the second record, which has two clips."""
    record = json.loads((folder / "chats.jsonl").read_text().splitlines()[1])
    inputs = processed(folder, record)
    asked = int((inputs.pop("labels")[0] != -100).nonzero()[0])
    cut = {name: value[:, :asked] for name, value in inputs.items() if name in ("input_ids", "attention_mask")}
    given: Any = loaded(model).eval().generate(**{**inputs, **cut}, max_new_tokens=TOKENS, do_sample=False)
    parts = record["messages"][0]["content"]
    names = [str(folder / "clips" / part["audio"]) for part in parts if part["type"] == "audio"]
    return parts[-1]["text"], names, given[0, asked:].tolist()


@pytest.mark.parametrize("architecture", only_first(MODELS))
def test_it_answers_about_clips_as_transformers_does(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    model_folder(tmp_path / "model", architecture)
    write_records(tmp_path, [1, 2, 0, 1, 1, 1, 0, 1])
    # Hardly trained, so that it answers with more than the end of the text.
    ranks.run(train, settings(tmp_path, "run", duration={"steps": 1}, optimizer={"lr": 1e-6}), world=2)
    run = tmp_path / "runs" / "run"
    question, names, expected = by_transformers(tmp_path, run / "model")
    clips = [word for name in names for word in ("--audio", name)]
    words = ["generate", str(run), "--prompt", question, *clips, "--json", "--max-new-tokens", str(TOKENS)]
    for world in (1, 2):
        (code, said, told), *_ = ranks.run(command, *words, world=world)
        assert code == 0, told
        assert json.loads(said)["tokens"] == expected
        assert len(set(expected)) > 1
    text = json.dumps([{"role": "user", "content": question}])
    code, _, told = ranks.run(command, "generate", str(run), "--messages", text, "--audio", "gone.wav", world=1)[0]
    assert code != 0
    assert "gone.wav" in told
