"""Evaluations by generated answers: those of Transformers' own `generate`, measured by jiwer, on 1, 2 and 4 ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jiwer
import pytest
import torch
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.config.part import decode
from fullshard.contracts.data import IGNORE
from fullshard.contracts.evaluation import Evaluation
from fullshard.contracts.model import Family
from fullshard.data.prepare import Stored
from fullshard.data.records import Listed
from fullshard.errors import DataError, RecipeError, SetupError
from fullshard.families.audio.encoders.audio_chat import AudioChat
from fullshard.families.audio.encoders.speechocean762 import Speechocean762
from fullshard.families.audio.models.audio_lm import AudioLM
from fullshard.families.audio.objectives.audio_lm import AudioLM as Objective
from tests.families.audio.small import MODELS, loaded, model_folder, processed, settings, write_records
from tests.families.audio.unit.test_speechocean762 import RECORD
from tests.ranks import RankPool
from tests.slow import only_first
from tests.small import train

CLIPS = [1, 2, 0, 1, 1, 0, 1]
"""Clips of each record: two ranks share five records with clips and two without."""


def part(kind: str, **keys: Any) -> Any:
    return decode(Evaluation, {"kind": kind, **keys}, where="evaluate.parts[0]")


@torch.no_grad()
def by_transformers(folder: Path, records: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The expected and the generated answers of the exported model, and of its processor."""
    model = loaded(folder / "runs" / "run" / "model").eval()
    tokenizer = AudioLM(path=str(folder / "model")).load_processor(folder / "model", where="model.path").tokenizer
    inputs = [processed(folder, record) for record in records]
    answers = [row["labels"][row["labels"] != IGNORE].tolist() for row in inputs]
    made = []
    for row in inputs:
        asked = int((row.pop("labels")[0] != IGNORE).nonzero()[0])
        row |= {name: row[name][:, :asked] for name in ("input_ids", "attention_mask")}
        ids = model.generate(
            **row, max_new_tokens=2 * max(map(len, answers)), do_sample=False, eos_token_id=tokenizer.eos_token_id
        )
        made.append(ids[0, asked:].tolist())
    expected, found = ([tokenizer.decode(row, skip_special_tokens=True).strip() for row in r] for r in (answers, made))
    return expected, found


def command(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [*words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def without_cache(*words: str) -> tuple[int, str, str]:
    """The command in a process whose families keep no keys and values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Family, "keeps_cache", False)
        return command(*words)


def measured(ranks: RankPool, run: Path, *, world: int, how: Any = command) -> dict[str, Any]:
    """The numbers and the answers of every validation sample."""
    parts = "evaluate.parts=[audio_answers, {kind: wer, samples: null, show: 99}]"
    (code, said, told), *_ = ranks.run(how, "evaluate", str(run / "last"), parts, "--json", world=world)
    assert code == 0, told
    found = json.loads(said)
    return {"texts": found["texts"], **found["numbers"]}


@pytest.mark.parametrize("architecture", only_first(MODELS))
def test_error_rates_are_those_of_jiwer_for_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, architecture: str
) -> None:
    """Of the answers that Transformers generates with the exported model; with a key-value cache and without."""
    model_folder(tmp_path / "model", architecture)
    file = write_records(tmp_path, CLIPS, numbered=False)
    chosen = settings(
        tmp_path,
        "run",
        data={"validation": str(file)},
        batch={"per_device": 4, "global": 8},
        duration={"steps": 30},
        optimizer={"lr": 1e-2},
        sharding={"activation_checkpointing": "full"},
        evaluate={"parts": ["audio_answers", {"kind": "wer", "samples": None}]},
    )
    records = ranks.run(train, chosen, world=2)[0]
    [trained] = [record for record in records if record["kind"] == "validation"]
    run = tmp_path / "runs" / "run"
    found = {world: measured(ranks, run, world=world) for world in (1, 2, 4)}
    assert found[1] == found[2] == found[4] == measured(ranks, run, world=2, how=without_cache)
    assert {name: trained[name] for name in ("answers", "wer", "cer")}.items() <= found[1].items()
    expected, answers = by_transformers(tmp_path, [json.loads(line) for line in file.read_text().splitlines()])
    right = sum(one == other for one, other in zip(expected, answers, strict=True))
    numbers = [jiwer.wer(expected, answers), jiwer.cer(expected, answers), right / len(expected)]
    assert [found[1][name] for name in ("wer", "cer", "answers")] == numbers
    assert len(set(answers)) > 1  # so that answers in another order give other numbers
    assert all(answer in found[1]["texts"][0] for answer in answers)


@pytest.mark.parametrize("kind", ["audio_answers", "wer", "pronunciation"])
def test_an_objective_without_tokens_is_refused(kind: str) -> None:
    from fullshard.contracts.objective import Objective as Contract

    class Other(Contract):
        pass

    with pytest.raises(RecipeError, match=rf"{kind} needs an objective that predicts tokens.*objective: audio_lm"):
        part(kind).gives(Other.model_construct(), torch.nn.Module())


def held_out(encoder: Any, *records: dict[str, Any]) -> Any:
    listed = Listed(list(records), where=lambda index: f"val.jsonl:{index + 1}", fingerprint=lambda: "")
    return Stored(listed, None, None, encoder)


def test_pronunciation_needs_scores_in_the_answers() -> None:
    check = part("pronunciation").check
    check(Objective(), torch.nn.Module(), held_out(Speechocean762(), RECORD))
    written = {"audio": RECORD["audio"], "text_input": f"Q {json.dumps(SCORED)}", "prompt_only": "Q "}
    check(Objective(), torch.nn.Module(), held_out(AudioChat(), written))
    plain = {"audio": RECORD["audio"], "prompt": "Which word?", "response": "one"}
    with pytest.raises(DataError, match=r"val.jsonl:1: .*pronunciation needs answers in JSON with accuracy.*found"):
        check(Objective(), torch.nn.Module(), held_out(AudioChat(), plain))


SCORED = {"accuracy": 8, "prosodic": 7, "fluency": 9, "total": 8, "word transcript": "A", "phoneme transcript": "AH0"}


def test_without_jiwer_the_check_before_training_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jiwer", None)
    with pytest.raises(SetupError, match=r"pip install 'fullshard\[audio\]'"):
        part("wer").check(Objective(), torch.nn.Module(), None)
