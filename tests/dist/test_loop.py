"""The loop on real ranks: validation numbers, the best model, early stops, guards, precision, what is logged."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from pydantic import PrivateAttr
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from fullshard.checkpoint import folder as files
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.objective import Batch, Numbers, Terms
from fullshard.families.language.objectives.causal_lm import CausalLM
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train

MASKED = -100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loop")
    model_folder(path / "model")
    rows = token_file(path / "train.jsonl", records=90)
    token_file(path / "five.jsonl", records=5, seed=3)
    masked = [{"input_ids": row, "labels": [MASKED] * (len(row) // 2) + row[len(row) // 2 :]} for row in rows[:37]]
    (path / "masked.jsonl").write_text("".join(json.dumps(record) + "\n" for record in masked))
    return path


def outcome(settings: dict[str, Any]) -> tuple[str, str, int]:
    """How a rank's run ended: the reason or the error, and the last step."""
    from fullshard.recipes.read import read as read_recipe
    from fullshard.run import execute

    try:
        result = execute(read_recipe(settings), resume="auto")
    except Exception as error:
        return type(error).__name__, str(error), -1
    return result.stopped, "", result.step


def validated(folder: Path, name: str, *, validation: str = "masked", **sections: Any) -> dict[str, Any]:
    sections = {"duration": {"steps": 2}, **sections}
    data = {"validation": str(folder / f"{validation}.jsonl"), **sections.pop("data", {})}
    evaluate = {"every_steps": 1, "parts": ["loss"], **sections.pop("evaluate", {})}
    return recipe(folder, name=name, data=data, evaluate=evaluate, **sections)


def run_folder(settings: dict[str, Any]) -> Path:
    return Path(settings["output"], settings["name"])


def validations(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == "validation"]


@torch.no_grad()
def plain_validation(model_path: Path, data: Path) -> dict[str, float]:
    """Each record by itself through Transformers' model: no padding, no batches, no ranks."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    total, correct, count = 0.0, 0, 0
    for line in data.read_text().splitlines():
        record = json.loads(line)
        ids = torch.tensor([record["input_ids"]])
        targets = torch.tensor(record.get("labels", record["input_ids"]))[1:]
        logits = model(input_ids=ids).logits[0, :-1]
        total += cross_entropy(logits.double(), targets, ignore_index=MASKED, reduction="sum").item()
        correct += int(((logits.argmax(-1) == targets) & (targets != MASKED)).sum())
        count += int((targets != MASKED).sum())
    return {"loss": total / count, "accuracy": correct / count, "perplexity": math.exp(total / count)}


# Validation


@pytest.mark.parametrize(
    ("world", "per_device", "validation"),
    [(1, 8, "masked"), (2, 3, "masked"), (4, 2, "masked"), (4, 4, "five")],
)
def test_validation_is_the_exact_average_over_unique_samples(
    ranks: RankPool, folder: Path, world: int, per_device: int, validation: str
) -> None:
    """37 samples on 4 ranks, and 5 in a batch of 16 places: fillers never enter a number, masked positions neither."""
    settings = validated(
        folder,
        f"{validation}-{world}-{per_device}",
        validation=validation,
        evaluate={"per_device": per_device},
        optimizer={"lr": 0.03},
    )
    found = validations(ranks.run(train, settings, world=world)[0])[-1]
    expected = plain_validation(run_folder(settings) / "model", folder / f"{validation}.jsonl")
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)


def test_the_accuracy_above_is_not_trivial(folder: Path) -> None:
    accuracies = [
        plain_validation(path / "model", folder / "masked.jsonl")["accuracy"]
        for path in (folder / "runs").glob("masked-*")
    ]
    assert accuracies
    assert all(0.02 < accuracy < 0.98 for accuracy in accuracies), accuracies


def test_packed_validation_counts_every_token_once(ranks: RankPool, folder: Path) -> None:
    """Packed rows and single samples hold the same documents; only where a row end cuts one is its context shorter."""
    settings = validated(folder, "packed", data={"pack": True, "sequence_length": 48}, validation="five")
    found = validations(ranks.run(train, settings, world=2)[0])[-1]
    expected = plain_validation(run_folder(settings) / "model", folder / "five.jsonl")
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.05)


def test_the_best_model_by_the_highest_accuracy(ranks: RankPool, folder: Path) -> None:
    settings = validated(
        folder,
        "highest",
        duration={"steps": 6},
        optimizer={"lr": 0.05},
        checkpoint={"best": "accuracy", "keep": 1},
    )
    records = ranks.run(train, settings, world=2)[0]
    accuracies = [record["accuracy"] for record in validations(records)]
    best = accuracies.index(max(accuracies)) + 1
    assert len(set(accuracies)) > 2, accuracies
    assert os.readlink(run_folder(settings) / "best") == f"checkpoint-{best}"
    progress = files.read_state(run_folder(settings) / "last")["progress"]
    assert (progress["best"], progress["best_step"]) == (max(accuracies), best)
    log = (run_folder(settings) / "log.txt").read_text()
    assert "at each best (highest accuracy)" in log
    assert log.count("First Val Accuracy") == 1
    assert yaml.safe_load((run_folder(settings) / "recipe.resolved.yaml").read_text())["checkpoint"]["best"] == {
        "metric": "accuracy",
        "mode": "max",
    }


def test_a_missing_best_metric_loses_no_step(ranks: RankPool, folder: Path) -> None:
    """The evaluation does not declare its numbers, so only the first validation can tell; the run resumes from
    there."""
    parts = [f"{__name__}.Unsaid"]
    settings = validated(
        folder, "late", evaluate={"every_steps": 2, "parts": parts}, checkpoint={"best": {"metric": "x", "mode": "max"}}
    )
    for kind, message, _ in ranks.run(outcome, settings, world=2):
        assert kind == "RecipeError"
        assert "checkpoint.best.metric = 'x' is not among the validation numbers: y." in message
        assert "Write checkpoint.best: {metric: y, mode: max} (or min), or checkpoint.best: null." in message
        assert "The model of step 2 is saved" in message
    settings["checkpoint"]["best"] = {"metric": "y", "mode": "max"}
    records = ranks.run(train, settings, world=2)[0]
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2], "trained once"
    assert (records[-1]["best"], records[-1]["best_step"]) == (1.0, 2)
    assert "Average Train Loss: 0.0" not in (run_folder(settings) / "log.txt").read_text()


def test_a_number_that_only_gets_worse_is_reported_at_the_end_too(ranks: RankPool, folder: Path) -> None:
    parts = [f"{__name__}.Worse"]
    settings = validated(folder, "worse", evaluate={"every_steps": 1, "parts": parts}, checkpoint={"best": "y"})
    settings["duration"] = {"steps": 3}
    ranks.run(train, settings, world=1)
    log = [" ".join(line[28:].split()) for line in (run_folder(settings) / "log.txt").read_text().splitlines()]
    assert [line for line in log if "Best Val" in line] == []
    assert "First Val Y: 1.000000 (the baseline)" in log
    assert "warning: validation y has risen since the first evaluation (1 → 2): optimizer.lr may be" in " ".join(log)
    end = " ".join(log[log.index("Training complete!") :])
    assert "warning validation y has risen at every evaluation since the first (1 → 3)" in end
    assert "best 1.000000 at step 1, the first evaluation; no later one was better" in end
    assert os.readlink(run_folder(settings) / "best") == "checkpoint-1"


class Worse(Evaluation):
    """Finds one more each time."""

    numbers: ClassVar[Numbers | None] = {"y": "min"}
    _times: int = PrivateAttr(0)

    def run(self, inputs: EvaluationInputs) -> Findings:
        self._times += 1
        return Findings({"y": float(self._times)})


class Unsaid(Evaluation):
    """A user's evaluation without `numbers`."""

    def run(self, inputs: EvaluationInputs) -> Findings:
        return Findings({"y": 1.0})


def test_a_contradicting_best_mode_is_in_the_header(ranks: RankPool, folder: Path) -> None:
    settings = validated(
        folder, "against", duration={"steps": 1}, checkpoint={"best": {"metric": "accuracy", "mode": "min"}}
    )
    ranks.run(train, settings, world=1)
    log = (run_folder(settings) / "log.txt").read_text()
    header = " ".join(word for line in log.splitlines() for word in line[28:].split())
    assert "warning best: checkpoint.best.mode = min keeps the model with the lowest accuracy, the worst one" in header


def test_only_a_whole_epoch_is_called_completed(ranks: RankPool, folder: Path) -> None:
    """90 samples, 16 a step: 6 steps an epoch."""
    settings = validated(folder, "partial", duration={"steps": 8}, checkpoint={"every_steps": 2})
    ranks.run(train, settings, world=1)
    log = (run_folder(settings) / "log.txt").read_text()
    assert "Started Training on: 1 / 2 epoch\n" in log
    assert "Epoch 1 completed in " in log
    assert "Started Training on: 2 / 2 epoch (2 of its 6 steps)" in log
    assert "Epoch 2 is not complete: 2 of its 6 steps in " in log
    settings["duration"] = {"steps": 12}
    ranks.run(train, settings, world=1)
    log = (run_folder(settings) / "log.txt").read_text()
    assert "Started Training on: 2 / 2 epoch (steps 3 to 6 of 6)" in log
    assert "Epoch 2 completed: steps 3 to 6 of 6 in " in log
    assert "Epoch 2 completed in " not in log


def test_an_unknown_best_metric_lists_the_known_ones(ranks: RankPool, folder: Path) -> None:
    settings = validated(folder, "unknown", checkpoint={"best": {"metric": "accurcy", "mode": "max"}})
    for kind, message, _ in ranks.run(outcome, settings, world=2):
        assert kind == "RecipeError"
        assert "checkpoint.best.metric = 'accurcy'" in message
        assert "accuracy, loss, perplexity" in message


def test_early_stopping_is_agreed_by_all_ranks(ranks: RankPool, folder: Path) -> None:
    """The loss falls, so by the highest loss the first validation stays the best one."""
    settings = validated(
        folder,
        "patience",
        duration={"steps": 20},
        evaluate={"patience": 2},
        checkpoint={"best": {"metric": "loss", "mode": "max"}},
    )
    assert ranks.run(outcome, settings, world=4) == [("patience", "", 3)] * 4
    assert (run_folder(settings) / "model" / "config.json").exists()
    assert os.readlink(run_folder(settings) / "best") == "checkpoint-1"


# What is written down


def test_metrics_have_the_promised_keys(ranks: RankPool, folder: Path) -> None:
    settings = validated(folder, "keys", duration={"epochs": 1}, batch={"per_device": 4, "global": 16})
    del settings["duration"]["steps"]
    records = ranks.run(train, settings, world=2)[0]
    trained = [record for record in records if record["kind"] == "train"]
    promised = {
        "kind",
        "step",
        "epoch",
        "loss",
        "lr",
        "grad_norm",
        "samples",
        "tokens",
        "seconds",
        "memory_gib",
        "host_memory_gib",
        "time",
    }
    assert promised <= trained[0].keys()
    assert promised | {"tokens_per_second", "data_wait"} <= trained[1].keys()
    assert {"kind", "step", "epoch", "loss", "accuracy", "perplexity"} == validations(records)[0].keys()
    assert [record["step"] for record in trained] == list(range(1, 7))
    assert trained[-1]["epoch"] == 1.0
    real_tokens = sum(len(json.loads(line)["input_ids"]) for line in (folder / "train.jsonl").read_text().splitlines())
    assert (trained[-1]["samples"], trained[-1]["tokens"]) == (90, real_tokens), "fillers are not counted"
    finished = records[-1]
    assert (finished["kind"], finished["event"], finished["stopped"], finished["step"]) == (
        "event",
        "finished",
        "done",
        6,
    )
    assert finished["validation"] == {key: validations(records)[-1][key] for key in finished["validation"]}


def test_a_logged_loss_is_the_average_since_the_last_one(ranks: RankPool, folder: Path) -> None:
    each = ranks.run(train, recipe(folder, name="each"), world=2)[0]
    thirds = ranks.run(train, recipe(folder, name="thirds", log={"every_steps": 3}), world=2)[0]
    assert [record["step"] for record in thirds if record["kind"] == "train"] == [1, 3, 6]
    losses = [loss for (loss,) in curve(each, "loss")]
    rows = [json.loads(line)["input_ids"] for line in (folder / "train.jsonl").read_text().splitlines()]
    counts = [sum(len(row) - 1 for row in rows[16 * step : 16 * step + 16]) for step in range(6)]
    for (found,), window in zip(curve(thirds, "loss"), (range(1), range(1, 3), range(3, 6)), strict=True):
        expected = sum(losses[i] * counts[i] for i in window) / sum(counts[i] for i in window)
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 23), (2, 12), (4, 6)])
def test_accumulation_changes_the_number_of_steps(ranks: RankPool, folder: Path, accumulate: int, steps: int) -> None:
    settings = recipe(folder, name=f"accumulate-{accumulate}", checkpoint={"at_end": False})
    settings |= {"batch": {"per_device": 4, "accumulate": accumulate}, "duration": {"epochs": 1}}
    records = ranks.run(train, settings, world=1)[0]
    assert len(curve(records, "step")) == steps  # of 90 samples; the partial last window is a step
    assert curve(records, "samples")[-1] == (90,)


def test_without_clipping_the_logged_norm_is_the_plain_one(ranks: RankPool, folder: Path) -> None:
    settings = recipe(folder, name="unclipped", optimizer={"clip": None}, duration={"steps": 3})
    found = curve(ranks.run(train, settings, world=4)[0], "loss", "grad_norm")
    rows = [json.loads(line)["input_ids"] for line in (folder / "train.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step, (loss, norm) in enumerate(found):
        batch = rows[16 * step : 16 * step + 16]
        count = sum(len(row) - 1 for row in batch)
        total = 0.0
        for row in batch:
            ids = torch.tensor([row])
            part = cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum") / count
            part.backward()
            total += part.item()
        plain = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
        assert loss == pytest.approx(total, rel=1e-6)
        assert norm == pytest.approx(plain, rel=2e-6)
        assert norm > 1.0, "clipping at 1 would show"
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / 3)
        optimizer.step()
        optimizer.zero_grad()


# Guards


def test_a_nan_loss_stops_the_run_with_exit_code_3(folder: Path) -> None:
    settings = recipe(folder, name="nan", optimizer={"lr": 1e38, "clip": None}, schedule={"kind": "constant"})
    (folder / "nan.yaml").write_text(yaml.safe_dump(settings))
    from fullshard.cli import app

    result = CliRunner().invoke(app, ["train", str(folder / "nan.yaml")])
    assert result.exit_code == 3, result.output
    assert "both must be finite. Lower optimizer.lr" in result.output
    assert "No checkpoint has been saved yet." in " ".join(result.output.split())
    assert "Traceback" not in result.output


class Breaking(CausalLM):
    """The usual loss, on rank 1 not a number from some micro-batch on."""

    whole: int
    """Micro-batches that are left as they are."""
    _seen: int = PrivateAttr(0)

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        terms = super().loss(model, batch, aux)
        self._seen += torch.is_grad_enabled()
        broken = self._seen > self.whole and os.environ["RANK"] == "1"
        return Terms(terms.loss_sum * math.nan, terms.metrics) if broken else terms


def test_nan_and_inf_never_enter_a_checkpoint(ranks: RankPool, folder: Path) -> None:
    """Also where the step that breaks is not a logged one, and where it breaks on one rank only."""
    settings = recipe(
        folder,
        name="unlogged",
        objective={"kind": f"{__name__}.Breaking", "whole": 4},  # two steps of two micro-batches
        checkpoint={"every_steps": 1, "keep": None},
        log={"every_steps": 100},
        duration={"steps": 20},
    )
    ends = ranks.run(outcome, settings, world=2)
    assert [kind for kind, _, _ in ends] == ["NumericalError"] * 2, ends
    assert "At step 3 the loss is nan" in ends[0][1]
    saved = files.published(run_folder(settings))
    assert [path.name for path in saved] == ["checkpoint-1", "checkpoint-2"]
    assert all(f"The last checkpoint before it is {saved[-1]}." in said for _, said, _ in ends), ends
    assert ranks.run(all_finite, saved[-1], world=1) == [True]


def all_finite(checkpoint: Path) -> bool:
    import torch.distributed.checkpoint as dcp

    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(getattr(entry, "size", ())) for name, entry in stored.items() if name.startswith("model/")
    }
    dcp.load(state, checkpoint_id=checkpoint)
    return all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


def test_nothing_to_train_is_refused(ranks: RankPool, folder: Path) -> None:
    for kind, message, _ in ranks.run(outcome, recipe(folder, name="frozen", model={"freeze": ["*"]}), world=2):
        assert kind == "RecipeError"
        assert "no trainable parameter" in message


# Precision


@pytest.fixture(scope="module")
def full_precision(ranks: RankPool, folder: Path) -> list[float]:
    return [loss for (loss,) in curve(ranks.run(train, recipe(folder, name="fp32"), world=2)[0], "loss")]


@pytest.mark.parametrize(("precision", "band"), [("fp16", 5e-3), ("bf16", 5e-3)])
def test_half_precision_stays_near_fp32(
    ranks: RankPool, folder: Path, full_precision: list[float], precision: str, band: float
) -> None:
    """Six steps at a high learning rate, loss by loss: 1e-3 relative is seen for both."""
    settings = recipe(folder, name=precision, precision=precision)
    records = ranks.run(train, settings, world=2)[0]
    losses = [loss for (loss,) in curve(records, "loss")]
    assert losses == pytest.approx(full_precision, rel=band)
    assert losses != full_precision, "half precision must be in force"
    assert losses[-1] < losses[0] - 0.5
    assert all(("loss_scale" in record) == (precision == "fp16") for record in records if record["kind"] == "train")
    units = json.loads((run_folder(settings) / "units.json").read_text())["units"]
    assert {unit["compute"] for unit in units} == {"float16" if precision == "fp16" else "bfloat16"}
    assert {(*unit["storage"], unit["reduce"]) for unit in units} == {("float32", "float32")}


def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: RankPool) -> None:
    results = ranks.run(one_rank_overflows, world=2)
    for skipped, moved, scale in results:
        assert (skipped, moved, scale) == (True, False, 32768.0)


def one_rank_overflows() -> tuple[bool, bool, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from fullshard.faults.judge import Verdict
    from fullshard.step import _update

    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 8)).sum()).backward()
    before: Any = model.weight.to_local().clone()
    if os.environ["RANK"] == "1":
        model.weight.grad.to_local().fill_(math.inf)
    scaler.unscale_(optimizer)
    good = Verdict(torch.tensor(False), torch.tensor(0.0), torch.tensor(1.0))
    skipped = _update(optimizer, scaler, good)
    moved = not torch.equal(before, model.weight.to_local())
    return skipped, moved, scaler.get_scale()
