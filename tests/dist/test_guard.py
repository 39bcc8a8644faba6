"""The guard on real ranks: NaN on one rank and loss spikes are skipped, rolled back or stop the run; and stragglers.

What a guarded run must be equal to is written here: a loop without that update, or a run without those samples.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fullshard.checkpoint import folder as files
from fullshard.faults.watch import LEFT_OUT
from tests.dist.bad_steps import train_with_late_data
from tests.dist.test_fp16 import outcome, run_folder, states
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train

BAD = "tests.dist.bad_steps.Bad"
PER_STEP, STEPS, BAD_STEP = 16, 6, 4
WINDOW = range((BAD_STEP - 1) * PER_STEP, BAD_STEP * PER_STEP)
"""The samples of the bad step: the data is not shuffled."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guard")
    model_folder(path / "model", tied=False)
    token_file(path / "train.jsonl", records=20 * PER_STEP)
    lines = (path / "train.jsonl").read_text().splitlines(keepends=True)
    (path / "without.jsonl").write_text("".join(line for i, line in enumerate(lines) if i not in WINDOW))
    return path


def bad(folder: Path, name: str, *, samples: list[int] | None = None, factor: str = "nan", **more: Any) -> Any:
    """A run whose fourth step is NaN on one rank; it saves every two steps."""
    objective = {"kind": BAD, "samples": [WINDOW[5]] if samples is None else samples, "factor": factor}
    usual: dict[str, Any] = {"checkpoint": {"every_steps": 2, "keep": None}, "ema": 0.5}
    return recipe(folder, name=name, objective=objective, **usual | more)


def last(ranks: RankPool, settings: dict[str, Any], step: int = STEPS) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = ranks.run(states, run_folder(settings), [f"checkpoint-{step}"], world=1)[0][0]
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def events(records: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [record for record in records if record.get("event") == name]


# Skip


MUON = {"kind": "muon", "lr": 1e-2}
HARD = [pytest.mark.slow]
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "full": (2, 1, {}),
    "one rank": (1, 1, {}),
    "hybrid": (4, 2, {"sharding": "hybrid"}),
    "none": (2, 1, {"sharding": "none"}),
    "no clipping": (2, 1, {"optimizer": {"clip": None}}),
    "muon": (2, 1, {"optimizer": MUON}),
}
QUICK = ("full", "one rank")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else HARD) for c in CASES])
def test_a_skipped_step_is_an_update_that_is_left_out(ranks: RankPool, folder: Path, case: str) -> None:
    """Weights, moments and averages, bitwise; the reference has no guard and an optimizer that rests in one step."""
    world, nodes, sections = CASES[case]
    name = case.replace(" ", "-")
    settings = bad(folder, f"skip-{name}", guard={"not_finite": "skip"}, **sections)
    records = ranks.run(train, settings, world=world, nodes=nodes)[0]
    assert [record.get("skipped_steps") for record in records if record["kind"] == "train"] == [0, 0, 0, 1, 1, 1]
    [event] = events(records, "skipped")
    assert (event["step"], event["cause"], event["loss"]) == (BAD_STEP, "not_finite", None)
    kind = "MuonLeavesOut" if case == "muon" else "LeavesOut"
    resting = {**sections.get("optimizer", {}), "kind": f"tests.dist.bad_steps.{kind}", "steps": [BAD_STEP - 1]}
    plain = bad(folder, f"rest-{name}", samples=[], **{**sections, "ema": None, "optimizer": resting})
    ranks.run(train, plain, world=world, nodes=nodes)
    guarded = last(ranks, settings)
    averages = {key: tensor for key, tensor in guarded.items() if key.endswith("/ema")}
    assert averages
    assert equal({key: guarded[key] for key in guarded if key not in averages}, last(ranks, plain))
    before, after = (last(ranks, settings, step) for step in (2, 4))
    assert not equal(before, after), "step 3 did change the weights"
    log = (run_folder(settings) / "log.txt").read_text()
    assert "The update is skipped (1 in a row, 5 allowed)." in log
    assert "1 of 6 steps had NaN, Inf or a spike" in log


def test_the_average_rests_too(ranks: RankPool, folder: Path) -> None:
    """A save after every step: the average of the bad step is that of the one before."""
    settings = bad(folder, "average", guard={"not_finite": "skip"}, checkpoint={"every_steps": 1, "keep": None})
    ranks.run(train, settings, world=2)
    third, fourth, fifth = (last(ranks, settings, step) for step in (3, 4, 5))
    assert equal(third, fourth)
    assert not any(torch.equal(fourth[key], fifth[key]) for key in fourth if key.endswith("/ema"))


def test_skipping_is_what_a_plain_loop_does(ranks: RankPool, folder: Path) -> None:
    """One process, Transformers' model, torch's AdamW, one record at a time, `continue` at the bad step."""
    sections: dict[str, Any] = {"optimizer": {"clip": None, "weight_decay": 0.0}, "ema": None}
    settings = bad(folder, "plain", guard={"not_finite": "skip"}, **sections)
    ranks.run(train, settings, world=2)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    rows = [json.loads(line)["input_ids"] for line in (folder / "train.jsonl").read_text().splitlines()]
    for step in range(STEPS):
        if step == BAD_STEP - 1:
            continue
        window = rows[step * PER_STEP : (step + 1) * PER_STEP]
        count = sum(len(row) - 1 for row in window)
        for row in window:
            ids = torch.tensor([row])
            logits = model(input_ids=ids).logits[0, :-1]
            (torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / count).backward()
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
    found = last(ranks, settings)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[f"model/{name}"], parameter.detach(), rtol=1e-4, atol=2e-5)


def test_a_run_resumed_after_a_skip_is_the_straight_one(ranks: RankPool, folder: Path) -> None:
    settings = bad(folder, "straight", guard={"not_finite": "skip"})
    ranks.run(train, settings, world=2)
    again = settings | {"name": "resumed"}
    records = ranks.run(train, again, resume=str(run_folder(settings) / "checkpoint-4"), world=2)[0]
    assert equal(last(ranks, settings), last(ranks, again))
    assert curve(records, "step", "skipped_steps") == [(5, 1), (6, 1)]


def test_the_limit_of_skips_in_a_row_stops_the_run(ranks: RankPool, folder: Path) -> None:
    samples = [step * PER_STEP for step in (0, 2, 3, 4)]
    settings = bad(folder, "limit", samples=samples, guard={"not_finite": "skip", "limit": 2}, duration={"steps": 9})
    ends = ranks.run(outcome, settings, world=2)
    assert [kind for kind, _, _ in ends] == ["NumericalError"] * 2, ends
    assert ends[0] == ends[1]
    assert ends[0][1].startswith("At step 5 the loss is nan and the gradient norm nan; both must be finite. 3 updates ")
    assert "guard.limit = 2 allows 2" in ends[0][1]
    assert [path.name for path in files.published(run_folder(settings))] == ["checkpoint-2", "checkpoint-4"]
    assert all(bool(tensor.isfinite().all()) for tensor in last(ranks, settings, 4).values())


def test_a_nan_loss_in_fp16_is_skipped_and_overflows_are_not_the_guards(ranks: RankPool, folder: Path) -> None:
    settings = bad(folder, "half", guard={"not_finite": "skip"}, precision="fp16")
    records = ranks.run(train, settings, world=2)[0]
    assert [event["step"] for event in events(records, "skipped")] == [BAD_STEP]
    # 1e30 times the loss overflows in the backward pass only.
    overflowing = bad(folder, "overflow", factor="1e30", guard={"not_finite": "skip"}, precision="fp16")
    records = ranks.run(train, overflowing, world=2)[0]
    assert events(records, "skipped") == []
    assert [record["skipped_steps"] for record in records if record["kind"] == "train"] == [0, 0, 0, 1, 1, 1]


# Rollback


def test_a_rolled_back_run_never_had_these_samples(ranks: RankPool, folder: Path) -> None:
    settings = bad(folder, "back", guard={"not_finite": "rollback"})
    records = ranks.run(train, settings, world=2)[0]
    other = recipe(folder, name="without", data={"train": str(folder / "without.jsonl")}, ema=0.5)
    expected = ranks.run(train, other, world=2)[0]
    assert equal(last(ranks, settings), last(ranks, other))
    assert curve(records, "step", "loss", "lr") == curve(expected, "step", "loss", "lr"), "no curve doubles back"
    [event] = events(records, "rollback")
    assert (event["step"], event["bad_step"], event["sample_ids"]) == (2, BAD_STEP, list(WINDOW))
    [line] = (run_folder(settings) / LEFT_OUT).read_text().splitlines()
    assert json.loads(line) == {"step": BAD_STEP, "window": BAD_STEP - 1, "sample_ids": list(WINDOW)}
    assert curve(records, "rollbacks")[-1] == (1,)
    assert curve(records, "samples")[-1] == (STEPS * PER_STEP,)
    log = (run_folder(settings) / "log.txt").read_text()
    assert "Back to step 2; from now on the 16 samples of that step are left out (left_out.jsonl)." in log
    # A run that resumes later still leaves them out.
    again = settings | {"name": "back-resumed"}
    ranks.run(train, again, resume=str(run_folder(settings) / "checkpoint-4"), world=2)
    assert equal(last(ranks, settings), last(ranks, again))
    progress = [files.read_state(run_folder(run) / "checkpoint-6")["progress"]["guard"] for run in (settings, again)]
    assert progress[0] == progress[1]
    assert progress[0]["left_out"] == [BAD_STEP - 1]


def test_without_a_checkpoint_a_rollback_only_skips(ranks: RankPool, folder: Path) -> None:
    settings = bad(folder, "early", samples=[PER_STEP], guard={"not_finite": "rollback"})
    records = ranks.run(train, settings, world=2)[0]
    assert [event["step"] for event in events(records, "skipped")] == [2]
    assert "There is no checkpoint to go back to yet." in (run_folder(settings) / "log.txt").read_text()


@pytest.mark.slow
def test_rollbacks_that_do_not_help_stop_the_run(ranks: RankPool, folder: Path) -> None:
    """Every sample from step 4 on is bad, on four ranks, with saves in the background."""
    settings = bad(
        folder,
        "hopeless",
        samples=list(range(WINDOW[0], 20 * PER_STEP)),
        guard={"not_finite": "rollback", "limit": 2},
        checkpoint={"every_steps": 2, "keep": 1, "asynchronous": True},
    )
    ends = ranks.run(outcome, settings, world=4)
    assert [kind for kind, _, _ in ends] == ["NumericalError"] * 4, ends
    assert len(set(ends)) == 1
    assert "It would be rollback 3 to step 2, and guard.limit = 2 allows 2" in ends[0][1]
    assert all(bool(tensor.isfinite().all()) for tensor in last(ranks, settings, 2).values())


# Spikes


@pytest.mark.parametrize("policy", ["skip", "rollback", "stop"])
def test_a_loss_spike_is_left_out(ranks: RankPool, folder: Path, policy: str) -> None:
    """The loss of step 14 is fifty times too high on one rank; the ten steps before are what it is compared with."""
    guard = {"spike": policy, "window": 10}
    more: dict[str, Any] = {"duration": {"steps": 16}, "ema": None, "checkpoint": {"every_steps": 8, "keep": None}}
    settings = bad(folder, f"spike-{policy}", samples=[13 * PER_STEP + 3], factor="50", guard=guard, **more)
    if policy == "stop":
        ends = ranks.run(outcome, settings, world=2)
        assert [(kind, "At step 14 the loss is" in said) for kind, said, _ in ends] == [("NumericalError", True)] * 2
        assert "robust deviations above the median of the last 10. Lower optimizer.lr" in ends[0][1]
        return
    records = ranks.run(train, settings, world=2)[0]
    name = "skipped" if policy == "skip" else "rollback"
    [event] = events(records, name)
    assert event.get("bad_step", event["step"]) == 14
    if policy == "skip":
        resting = {"kind": "tests.dist.bad_steps.LeavesOut", "steps": [13]}
        plain = bad(folder, "spike-rest", samples=[], optimizer=resting, **more)
        ranks.run(train, plain, world=2)
        assert equal(last(ranks, settings, 16), last(ranks, plain, 16))


@pytest.mark.slow
def test_losses_to_compare_with_survive_a_resume(ranks: RankPool, folder: Path) -> None:
    more: dict[str, Any] = {"duration": {"steps": 16}, "checkpoint": {"every_steps": 12, "keep": None}}
    guard = {"spike": "skip", "window": 10}
    settings = bad(folder, "recall", samples=[13 * PER_STEP + 3], factor="50", guard=guard, **more)
    ranks.run(train, settings, world=2)
    again = settings | {"name": "recalled"}
    records = ranks.run(train, again, resume=str(run_folder(settings) / "checkpoint-12"), world=2)[0]
    assert [event["step"] for event in events(records, "skipped")] == [14]
    assert equal(last(ranks, settings, 16), last(ranks, again, 16))


def test_the_header_says_the_policy(ranks: RankPool, folder: Path) -> None:
    settings = bad(folder, "said", samples=[], guard={"spike": "rollback"}, duration={"steps": 1})
    ranks.run(train, settings, world=1)
    log = re.sub(r"\s+(\S+ \S+ rank 0\s+)?", " ", (run_folder(settings) / "log.txt").read_text())
    assert "stop on NaN or Inf in the loss or the gradient norm; rollback on a loss 8 robust deviations above" in log


# Stragglers


def test_a_rank_that_waits_for_data_is_named(ranks: RankPool, folder: Path) -> None:
    """Rank 1 waits at least 0.1 s for each micro-batch, and longer than a step takes."""
    settings = recipe(
        folder,
        name="straggler",
        duration={"steps": 60},
        batch={"per_device": 1, "global": 2},
        data={"sequence_length": 8},
        log={"every_steps": 10},
        checkpoint={"at_end": False},
    )
    records = ranks.run(train_with_late_data, settings, late=1, seconds=0.1, world=2)[0]
    # On a busy machine rank 0 may really be slower for a while, in some other phase, and is named too.
    [event] = [each for each in events(records, "straggler") if each["phase"] == "data"]
    assert event["rank"] == 1
    assert event["slower"] > 0.25
    said = (run_folder(settings) / "log.txt").read_text()
    assert said.count("steps: it waits for data.") == 1
    assert "Rank 1 (host " in said
