"""bf16 and fp16 stay within a stated band of fp32 over 100 steps, for every strategy, full and LoRA."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.slow import only_first
from tests.small import curve, model_folder, recipe, token_file, train

STEPS = 100
MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"r": 4, "alpha": 8, "dropout": 0.0, "targets": "all-linear"}},
}
RATES = {"full": 5e-3, "lora": 1.5e-2}
STRATEGIES = {"full": (2, 1), "grad_op": (2, 1), "hybrid": (4, 2), "none": (2, 1)}
"""Each with its ranks and nodes."""
BAND = {("full", "bf16"): 2e-3, ("full", "fp16"): 2.5e-4, ("lora", "bf16"): 2e-3, ("lora", "fp16"): 6e-4}
"""The largest relative distance of the loss from that of fp32, by averages over ten steps, anywhere in the run.

Found over the strategies, and for the last average: full bf16 4.7e-4 to 6.9e-4 (0.3e-5 to 1.9e-4), full fp16 0.4e-4 to
0.8e-4 (0.9e-5 to 2.4e-5), LoRA bf16 3.8e-4 to 5.5e-4 (0.4e-4 to 4.0e-4), LoRA fp16 1.8e-4 to 2.1e-4 (1.3e-4 to 2.1e-4).
"""

Losses = Callable[[str, str, str], list[float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("band")
    model_folder(path / "model", num_hidden_layers=1)
    token_file(path / "train.jsonl", records=400, longest=20)
    return path


@pytest.fixture(scope="module")
def losses(ranks: RankPool, folder: Path) -> Losses:
    """Gives the loss over a run, averaged over ten steps each; every run is made once."""
    runs: dict[tuple[str, str, str], list[float]] = {}

    def of(kind: str, precision: str, strategy: str) -> list[float]:
        if (kind, precision, strategy) not in runs:
            runs[kind, precision, strategy] = run(ranks, folder, kind, precision, strategy)
        return runs[kind, precision, strategy]

    return of


def run(ranks: RankPool, folder: Path, kind: str, precision: str, strategy: str) -> list[float]:
    world, nodes = STRATEGIES[strategy]
    settings = recipe(
        folder,
        name=f"{kind}-{precision}-{strategy}",
        model=MODELS[kind],
        precision=precision,
        sharding={"strategy": strategy},
        batch={"per_device": 8 // world, "global": 8},
        duration={"steps": STEPS},
        optimizer={"lr": RATES[kind]},
        schedule={"kind": "cosine", "warmup": 10},
        log={"every_steps": 10},
        checkpoint={"at_end": False},
    )
    records = ranks.run(train, settings, world=world, nodes=nodes)[0]
    found = {int(step): loss for step, loss in curve(records, "step", "loss")}
    return [found[step] for step in range(10, STEPS + 1, 10)]


def apart(found: list[float], exact: list[float]) -> float:
    """The largest relative distance."""
    return max(abs(ours - theirs) / theirs for ours, theirs in zip(found, exact, strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_the_runs_learn(losses: Losses, kind: str) -> None:
    """Otherwise the band would say little."""
    found = losses(kind, "fp32", "full")
    assert found[-1] < 0.75 * found[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", only_first(MODELS))
def test_half_precision_stays_in_the_band(
    folder: Path, losses: Losses, kind: str, precision: str, strategy: str
) -> None:
    # What fp32 gives does not depend on the strategy.
    distance = apart(losses(kind, precision, strategy), losses(kind, "fp32", "full"))
    assert 0 < distance < BAND[kind, precision]
    units = json.loads((folder / "runs" / f"{kind}-{precision}-{strategy}" / "units.json").read_text())["units"]
    assert {unit["compute"] for unit in units} == {"bfloat16" if precision == "bf16" else "float16"}


def test_the_band_can_be_left(losses: Losses) -> None:
    """By weights that are kept in bf16 (found: 5.4e-2); and bf16 is not within the band of fp16."""
    exact = losses("full", "fp32", "full")
    assert apart(losses("full", "bf16-pure", "full"), exact) > 3 * BAND["full", "bf16"]
    assert apart(losses("full", "bf16", "full"), exact) > BAND["full", "fp16"]
