"""Which validation number decides the best model, which way, and what is reported about each value."""

from __future__ import annotations

import io
import math
from typing import Any, ClassVar, Literal

import pytest
from torch import nn

from fullshard.checkpoint.settings import Best
from fullshard.config.part import decode
from fullshard.contracts.ema import Ema
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.objective import Objective
from fullshard.contracts.progress import Progress
from fullshard.control.best import BestRule, best_rule, gives_numbers, judge, only_worse, outcome
from fullshard.errors import RecipeError
from fullshard.evaluations.loss import Loss
from fullshard.families.diffusion.evaluations.fid import Fid
from fullshard.families.diffusion.evaluations.recognition import Recognition
from fullshard.families.embedding.evaluations.retrieval import Retrieval
from fullshard.families.embedding.evaluations.spearman import Spearman
from fullshard.families.language.evaluations.sample import Sample
from fullshard.families.language.objectives.causal_lm import CausalLM
from fullshard.log.console import Console

Direction = Literal["min", "max"]


class Embedder(nn.Module):
    embedding_width = 64


class Own(Evaluation):
    """A user's, which does not say what it finds."""

    def run(self, inputs: EvaluationInputs) -> Findings:
        return Findings({"wer": 0.5})


class Said(Own):
    """As the README has it."""

    numbers = {"wer": "min"}  # noqa: RUF012


def rule(
    metric: str, *parts: Evaluation, mode: Direction | None = None, objective: Any = None, ema: Ema | None = None
) -> BestRule | None:
    return best_rule(Best(metric=metric, mode=mode), parts, objective or CausalLM(), Embedder(), ema)


def contrastive(**settings: Any) -> Objective:
    return decode(Objective, {"kind": "contrastive", **settings})


FID, RECOGNITION = Fid(extractor="a.py:B"), Recognition(classifier="a.py:B")


@pytest.mark.parametrize(
    ("metric", "part", "mode"),
    [
        ("loss", Loss(), "min"),
        ("perplexity", Loss(), "min"),
        ("accuracy", Loss(), "max"),
        ("fid", FID, "min"),
        ("recognised", RECOGNITION, "max"),
        ("spearman", Spearman(), "max"),
        ("recall@5", Retrieval(at=[5]), "max"),
        ("mrr@10", Retrieval(), "max"),
        ("ndcg@10/16", Retrieval(dims=[16]), "max"),
        ("wer", Said(), "min"),
    ],
)
def test_the_direction_follows_from_the_number(metric: str, part: Evaluation, mode: Direction) -> None:
    assert rule(metric, part) == BestRule(metric, mode)
    other: Direction = "max" if mode == "min" else "min"
    for settings, prefix in ((Ema(evaluate="both"), "ema_"), (Ema(evaluate="ema"), "")):
        assert rule(prefix + metric, part, ema=settings) == BestRule(prefix + metric, mode)
    contradicted = rule(metric, part, mode=other)
    assert contradicted is not None
    assert contradicted.mode == other, "the recipe's mode wins"
    assert contradicted.contradicts


def test_a_mode_that_agrees_with_the_evaluation_is_no_contradiction() -> None:
    stated = rule("accuracy", Loss(), mode="max")
    assert stated is not None
    assert not stated.contradicts


def test_matryoshka_names_are_known_before_the_run() -> None:
    objective = contrastive(matryoshka=[16, 32])
    names = Retrieval(at=[1, 10]).gives(objective, Embedder())
    assert names is not None
    assert set(names) == {
        f"{name}{suffix}" for name in ("recall@1", "recall@10", "mrr@10", "ndcg@10") for suffix in ("", "/16", "/32")
    }
    assert rule("recall@10/32", Retrieval(), objective=objective) == BestRule("recall@10/32", "max")
    with pytest.raises(RecipeError, match=r"'loss' is not among .*Write checkpoint.best: recall@"):
        rule("loss", Retrieval(at=[1, 10]), objective=objective)


def test_accuracy_is_not_declared_if_it_is_not_measured() -> None:
    with pytest.raises(RecipeError, match="'accuracy' is not among the validation numbers: loss"):
        rule("accuracy", Loss(), objective=contrastive(loss="late_interaction"))
    assert rule("accuracy", Loss(), objective=contrastive()) == BestRule("accuracy", "max")


def test_an_unknown_direction_must_be_stated() -> None:
    with pytest.raises(RecipeError, match=r"Write checkpoint.best: \{metric: wer, mode: max\} \(or min\)"):
        rule("wer", Own())
    assert rule("wer", Own(), mode="min") == BestRule("wer", "min")
    assert rule("loss", Own(), Loss()) == BestRule("loss", "min"), "lower losses are better, whoever gives them"


def test_a_number_measured_only_at_the_end_cannot_choose_the_best() -> None:
    with pytest.raises(RecipeError, match="fid gives it at the end only"):
        rule("fid", Loss(), Fid(extractor="a.py:B", only_at_end=True))


def test_numbers_declared_without_directions_are_refused() -> None:
    class Old(CausalLM):
        numbers: ClassVar[Any] = ("loss", "mse")

    with pytest.raises(RecipeError, match=r"It must declare each number with its direction, such as numbers = "):
        rule("mse", Loss(), objective=Old())


def test_whether_a_validation_gives_any_number() -> None:
    def comes(*parts: Evaluation, held_out: bool) -> bool:
        return gives_numbers(parts, CausalLM(), Embedder(), held_out=held_out)

    assert comes(Loss(), held_out=True)
    assert not comes(Loss(), held_out=False)
    assert not comes(Sample(only_at_end=False), held_out=True)
    assert not comes(Fid(extractor="a.py:B", only_at_end=True), held_out=True)
    assert comes(RECOGNITION, held_out=False)
    assert comes(Own(), held_out=False)


def follow(
    values: list[float], *, mode: Direction = "min", at_start: bool = False, patience: int | None = None
) -> tuple[list[str], list[bool], Progress, BestRule]:
    """What the console says of each value, and which were kept."""
    out, progress, by = io.StringIO(), Progress(), BestRule("loss" if mode == "min" else "accuracy", mode)
    console, kept = Console(stream=out), []
    for number, value in enumerate(values, start=0 if at_start else 1):
        progress.step = 10 * number
        kept.append(judge(by, progress, value, patience=patience, console=console)[1])
    return out.getvalue().splitlines(), kept, progress, by


def test_the_first_value_is_the_baseline_and_only_better_ones_are_celebrated() -> None:
    said, kept, progress, by = follow([3.0, 2.0, 2.5])
    assert said == ["First Val Loss: 3.000000 (the baseline)", ">>>>>> New Best Val Loss: 2.000000"]
    assert kept == [True, True, False]
    assert outcome(by, progress) == "2.000000 at step 20"


def test_a_loss_that_only_rises_is_reported_at_each_validation_and_at_the_end() -> None:
    said, kept, progress, by = follow([2.1, 1_316_765.0, 456_809_000.0])
    assert kept == [True, False, False]
    assert not any("New Best" in line for line in said)
    assert "has risen since the first evaluation (2.1 → 1,316,765): optimizer.lr may be too high" in said[1]
    assert "has risen at every evaluation since the first (2.1 → 456,809,000)" in said[2]
    assert only_worse(by, progress) in said[2]
    assert outcome(by, progress) == "2.100000 at step 10, the first evaluation; no later one was better"


def test_an_accuracy_that_only_falls_is_reported() -> None:
    said, kept, _, _ = follow([0.5, 0.4], mode="max")
    assert kept == [True, False]
    assert "validation accuracy has fallen since the first evaluation (0.5 → 0.4)" in said[1]


def test_one_better_value_ends_the_warnings() -> None:
    said, _, progress, by = follow([2.0, 2.5, 2.4, 2.6])
    assert sum("has risen" in line for line in said) == 1
    assert only_worse(by, progress) is None


def test_a_value_before_the_first_step_is_the_baseline_but_not_a_checkpoint() -> None:
    said, kept, progress, by = follow([2.1, 456_809.0, 3.0, 2.0], at_start=True)
    assert kept == [False, True, True, True], "a checkpoint of step 0 does not exist"
    assert said[0] == "First Val Loss: 2.100000 (the baseline)"
    assert "Val Loss 456,809 is worse than 2.1 before training." in said
    assert [line for line in said if "New Best" in line] == [">>>>>> New Best Val Loss: 2.000000"]
    _, _, progress, by = follow([2.1, 456_809.0], at_start=True)
    assert outcome(by, progress) == "456809.000000 at step 10, worse than 2.1 before training"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_are_never_the_best(value: float) -> None:
    said, kept, progress, _ = follow([value, 2.0, value])
    assert kept == [False, True, False]
    assert f"Val Loss is {value} at step 10: it cannot be the best." in said[0]
    assert said[1] == "First Val Loss: 2.000000 (the baseline)"
    assert all(math.isfinite(number) for number in (progress.best or 0, progress.first or 0, progress.previous or 0))


def test_patience_counts_what_is_not_better_than_the_baseline() -> None:
    progress, by = Progress(step=0), BestRule("loss", "min")
    console = Console(silent=True)
    results = []
    for step, value in enumerate([2.0, 5.0, 4.0]):
        progress.step = step
        results.append(judge(by, progress, value, patience=2, console=console))
    assert results == [("done", False), ("done", True), ("patience", True)]
    assert progress.finished


def test_changing_the_metric_forgets_the_old_best() -> None:
    """In a run that continues by accuracy, a best loss of 2.3 would stay the best forever."""
    progress, out = Progress(step=10), io.StringIO()
    console = Console(stream=out)
    judge(BestRule("loss", "min"), progress, 2.3, patience=None, console=console)
    progress.step = 20
    assert judge(BestRule("accuracy", "max"), progress, 0.5, patience=None, console=console) == ("done", True)
    assert (progress.best, progress.best_step) == (0.5, 20)
    assert "checkpoint.best changed from min loss to max accuracy" in out.getvalue()


def test_a_checkpoint_without_a_first_value_can_be_resumed() -> None:
    progress, out = Progress(step=20, best=2.0, best_step=10), io.StringIO()
    judge(BestRule("loss", "min"), progress, 1.5, patience=None, console=Console(stream=out))
    assert out.getvalue() == ">>>>>> New Best Val Loss: 1.500000\n"
