"""The end of a run: which weights are exported, what a finished run says, and what is refused before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from fullshard.errors import RecipeError
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finish")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=64)
    token_file(path / "validation.jsonl", records=17, seed=1)
    return path


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    """Validates every step at a rate so large that the model soon gets worse."""
    base: dict[str, Any] = {
        "data": {"validation": str(folder / "validation.jsonl")},
        "optimizer": {"lr": 0.5},
        "schedule": {"kind": "constant"},
        "evaluate": {"parts": [{"kind": "loss"}], "every_steps": 1},
        "checkpoint": {"best": "loss", "every_epochs": None},
    }
    return recipe(folder, **{**base, **sections})


def validation_loss(folder: Path, model: Path) -> float:
    """The mean over all tokens of the validation file, by Transformers and torch alone."""
    import json

    module = AutoModelForCausalLM.from_pretrained(model)
    total, count = 0.0, 0
    for line in (folder / "validation.jsonl").read_text().splitlines():
        ids = torch.tensor([json.loads(line)["input_ids"]])
        with torch.no_grad():
            logits = module(input_ids=ids).logits[0, :-1]
        total += float(cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return total / count


@pytest.mark.parametrize("which", ["last", "best"])
def test_the_exported_model_holds_the_requested_weights(ranks: RankPool, folder: Path, which: str) -> None:
    checkpoint = {"best": "loss", "every_epochs": None, "export": which}
    records = ranks.run(train, settings(folder, name=which, checkpoint=checkpoint), world=2)[0]
    losses = [record["loss"] for record in records if record["kind"] == "validation"]
    assert min(losses) < losses[-1] - 0.01, "the run must get worse after its best step"
    expected = min(losses) if which == "best" else losses[-1]
    assert validation_loss(folder, folder / "runs" / which / "model") == pytest.approx(expected, rel=1e-5)


def test_a_run_out_of_patience_is_finished(ranks: RankPool, folder: Path) -> None:
    patient = settings(folder, name="patient", evaluate={"parts": [{"kind": "loss"}], "every_steps": 1, "patience": 2})
    first = ranks.run(train, patient, world=2)[0]
    assert len(curve(first, "loss")) < 6
    again = ranks.run(train, patient, world=2)[0]
    assert again == first
    log = {**patient, "evaluate": {**patient["evaluate"], "patience": None}}
    assert len(curve(ranks.run(train, log, world=2)[0], "loss")) == 6


def result(settings: dict[str, Any]) -> Any:
    """What one rank of a run gives back. Sent to the rank pool by name."""
    from fullshard.recipes.read import read
    from fullshard.run import execute

    return execute(read(settings), resume="auto")


def test_a_finished_run_returns_its_result_again(ranks: RankPool, folder: Path) -> None:
    finished = settings(folder, name="result", duration={"steps": 2})
    first = ranks.run(result, finished, world=2)[0]
    assert first.validation["loss"] > 0
    assert ranks.run(result, finished, world=2)[0] == first


def test_logged_averages_do_not_depend_on_a_resume(ranks: RankPool, folder: Path) -> None:
    logged = {"every_steps": 4, "sinks": []}
    shape: dict[str, Any] = {"schedule": {"kind": "constant"}, "log": logged, "duration": {"steps": 8}}
    straight = ranks.run(train, recipe(folder, name="straight", **shape), world=2)[0]
    saving = recipe(folder, name="cut", **shape, checkpoint={"every_steps": 6, "every_epochs": None, "best": None})
    ranks.run(train, saving, world=2)
    resumed = ranks.run(train, {**saving, "output": saving["output"]}, str(folder / "runs/cut/checkpoint-6"), world=2)[
        0
    ]
    assert curve(resumed, "step", "loss") == curve(straight, "step", "loss")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"checkpoint": {"best": "bleu"}}, r"checkpoint\.best\.metric = 'bleu' .* accuracy, loss, perplexity"),
        ({"data": {"sequence_length": 129}}, r"data\.sequence_length = 129, and the model has 128 positions"),
    ],
)
def test_mistakes_are_refused_before_the_first_step(folder: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        train(settings(folder, name="refused", **sections))
    assert not list((folder / "runs").glob("refused/checkpoint-*"))
