"""Section 4 of a check: real files through the real encoders, each finding provoked, and healthy data without any."""

from __future__ import annotations

import json
import random
import string
import time
from pathlib import Path
from typing import Any

import pytest

from fullshard.check import data
from fullshard.check.findings import Finding
from fullshard.contracts.data import IGNORE
from fullshard.data.loader import Loader
from fullshard.errors import DataError
from fullshard.families.embedding.objectives.contrastive import Contrastive
from fullshard.log.console import Console
from fullshard.recipe import Recipe
from fullshard.recipes.read import read_recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.run_inputs import check_batch, prepare_inputs
from tests import small


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.model_folder(tmp_path_factory.mktemp("small") / "model")


def lines(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def rows(path: Path, *samples: list[int]) -> str:
    return lines(path, [{"input_ids": sample} for sample in samples])


def distinct(number: int, *, size: int = 8, first: int = 0) -> list[list[int]]:
    """Samples that all differ."""
    return [[(first + i) % 97, (first + i) // 97, *range(10, 8 + size)] for i in range(number)]


def grounded(folder: Path, model: Path, *, world: int = 1, **sections: Any) -> tuple[Recipe, RunInputs]:
    # The model of the tests has no tokenizer, so that any is another one.
    other = {"tokenizer": sections.pop("tokenizer"), "resize_embedding": True} if "tokenizer" in sections else {}
    recipe = read_recipe(small.recipe(folder, model={"path": str(model), **other}, **sections))
    return recipe, prepare_inputs(recipe, world_size=world, console=Console(silent=True))


def look(folder: Path, model: Path, **sections: Any) -> dict[str, Finding]:
    """The findings by what was looked at; where there are several of one kind, the worst."""
    found: dict[str, Finding] = {}
    for finding in data.look(*grounded(folder, model, **sections)):
        assert finding.level == "ok" or (finding.text.endswith(".") and finding.remedy.endswith("."))
        if finding.check not in found or finding.level != "ok":
            found[finding.check] = finding
    return found


def problems(found: dict[str, Finding]) -> list[str]:
    return [finding.check for finding in found.values() if finding.level != "ok"]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("holdout", [0, 0.2])
def test_healthy_data_gives_ticks_only(tmp_path: Path, model: Path, pack: bool, holdout: float) -> None:
    rows(tmp_path / "train.jsonl", *distinct(40))
    found = look(tmp_path, model, data={"pack": pack, "holdout": holdout})
    assert problems(found) == []
    assert found["encoder"].text == "text (chosen by the keys of the first record)"
    count = 32 if holdout else 40
    assert found["train"].text.startswith(f"{count} records, {count} samples, {count * 8} tokens")
    assert ("filled)" in found["train"].text) == pack
    assert found["validation"].text.startswith("8 records, 8 samples" if holdout else "none")
    assert ("leakage" in found) == bool(holdout)
    assert found["duplicates"].text == f"none among {count} samples of train"


def test_the_quickstart_is_healthy_and_quick() -> None:
    recipe = read_recipe("quickstart")
    inputs = prepare_inputs(recipe, world_size=2, console=Console(silent=True))
    begun = time.monotonic()
    findings = list(data.look(recipe, inputs))
    assert time.monotonic() - begun < 2
    assert [finding for finding in findings if finding.level != "ok"] == []


def test_batches_are_made_and_described(tmp_path: Path, model: Path) -> None:
    rows(tmp_path / "train.jsonl", *[[5, 6, 7], *distinct(9, size=6), list(range(40)), *distinct(11, size=6, first=20)])
    found = look(tmp_path, model)
    assert found["first batch"].text == "input_ids, labels, position_ids 4 x 6"
    assert found["longest batch"].text == ("input_ids, labels, position_ids 4 x 40; the longest sample has 40 tokens")
    assert "data.pack=true would fill the rows" in found["padding"].text
    assert "padding" not in look(tmp_path, model, data={"pack": True})


@pytest.mark.parametrize("pack", [False, True])
def test_no_batch_of_an_epoch_is_longer_than_the_longest(tmp_path: Path, model: Path, pack: bool) -> None:
    small.token_file(tmp_path / "train.jsonl", records=60)
    recipe, inputs = grounded(tmp_path, model, data={"pack": pack, "shuffle": True})
    longest = data.longest_batch(inputs.data, per_device=4)
    lengths = inputs.data.train.lengths
    real = lengths[longest["sample_ids"].numpy()].sum()
    loader = Loader(
        inputs.data.train, inputs.data.collator, per_device=4, global_size=16, shuffle=True, seed=recipe.seed
    )
    windows = loader.windows()
    for _ in range(loader.steps_per_epoch):
        for batch in next(windows).batches:
            assert batch["input_ids"].numel() <= longest["input_ids"].numel()
            ids = batch["sample_ids"].numpy()
            assert lengths[ids[ids >= 0]].sum() <= real
    windows.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("pack", [False, True])
def test_lengths_are_those_of_the_samples(tmp_path: Path, model: Path, pack: bool) -> None:
    small.token_file(tmp_path / "train.jsonl", records=30)
    for encode in ("text", None):
        samples = grounded(tmp_path, model, data={"pack": pack, "encode": encode})[1].data.train
        assert list(samples.lengths) == [len(samples[i]["input_ids"]) for i in range(len(samples))]
        assert samples.lengths.sum() == samples.num_tokens


def test_fewer_samples_than_a_batch_still_make_a_batch(tmp_path: Path, model: Path) -> None:
    rows(tmp_path / "train.jsonl", *distinct(3))
    recipe, inputs = grounded(tmp_path, model)
    batch = data.longest_batch(inputs.data, per_device=4)
    assert tuple(batch["input_ids"].shape) == (4, 8)
    assert (batch["labels"][3] == IGNORE).all()
    assert [finding for finding in data.look(recipe, inputs) if finding.level != "ok"] == []


def test_an_objective_that_misses_a_key(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(tmp_path / "train.jsonl", *distinct(20))
    recipe, _ = grounded(tmp_path, model)
    monkeypatch.setattr(type(recipe.objective), "needs", ("input_ids", "scores"))
    with pytest.raises(DataError, match="needs scores in a batch, and the encoder text gives input_ids, labels"):
        grounded(tmp_path, model)


def test_an_objective_for_other_data(tmp_path: Path, model: Path) -> None:
    """The batch shows it, before the objective looks for the keys of a pair."""
    rows(tmp_path / "train.jsonl", *distinct(20))
    _, inputs = grounded(tmp_path, model)
    with pytest.raises(DataError, match=r"contrastive needs tokens, lengths, .* Choose data.encode=pairs, or the obj"):
        check_batch(Contrastive(), inputs.data)


def masked(ids: list[int], learned: int) -> dict[str, Any]:
    """A record whose last `learned` tokens are learned."""
    return {
        "input_ids": ids,
        "labels": [IGNORE] * (len(ids) - learned) + ids[-learned:] if learned else [IGNORE] * len(ids),
    }


def test_labels_that_are_nearly_all_masked(tmp_path: Path, model: Path) -> None:
    samples = distinct(20, size=40)
    lines(tmp_path / "train.jsonl", [masked(ids, 1) for ids in samples])
    found = look(tmp_path, model)
    assert problems(found) == ["masked labels"]
    assert "97.5% of positions have no loss term (20 samples)" in found["masked labels"].text
    lines(tmp_path / "train.jsonl", [masked(ids, 10) for ids in samples])
    assert look(tmp_path, model)["masked labels"].text.startswith("75.0%")


def test_all_labels_masked_stops_before_the_check(tmp_path: Path, model: Path) -> None:
    lines(tmp_path / "train.jsonl", [masked(ids, 0) for ids in distinct(4)])
    with pytest.raises(DataError, match="no sample is left"):
        grounded(tmp_path, model)


def test_samples_left_out(tmp_path: Path, model: Path) -> None:
    lines(tmp_path / "train.jsonl", [masked(ids, 4) for ids in distinct(9)] + [masked(distinct(1, first=50)[0], 0)])
    found = look(tmp_path, model)
    assert problems(found) == ["dropped"]
    assert "1 of 10 samples (10.0%) of data.train are left out" in found["dropped"].text
    assert "1 with no answer or all labels masked" in found["dropped"].text


def test_one_dropped_sample_of_many_is_only_a_note(tmp_path: Path, model: Path) -> None:
    lines(tmp_path / "train.jsonl", [masked(ids, 4) for ids in distinct(199)] + [{"input_ids": [5]}])
    found = look(tmp_path, model)
    assert problems(found) == []
    assert found["dropped"].text.startswith("1 of 200 samples")


@pytest.mark.parametrize(("long", "level"), [(8, "warning"), (1, "ok")])
def test_conversations_that_are_cut(tmp_path: Path, model: Path, long: int, level: str) -> None:
    draw = random.Random(0)
    answers = ["".join(draw.choices(string.ascii_letters, k=200 if i < long else 3)) for i in range(20)]
    lines(tmp_path / "train.jsonl", [{"question": f"q{i}", "answer": answer} for i, answer in enumerate(answers)])
    found = look(tmp_path, model, tokenizer={"train": {"vocab_size": 300}}, data={"sequence_length": 60})
    assert found["truncated"].level == level
    assert f"{long} of 20 samples ({long / 20:.1%})" in found["truncated"].text
    assert found["chat template"].text.startswith("plain")


def test_what_the_chat_template_leaves_out(tmp_path: Path, model: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "so"}]
    lines(tmp_path / "train.jsonl", [{"messages": messages, "number": i} for i in range(20)])
    found = look(tmp_path, model, tokenizer={"train": {"vocab_size": 300}}, data={"sequence_length": 60})
    assert found["unrendered"].level == "warning"
    assert "20 records have reasoning_content that the chat template does not render" in found["unrendered"].text


def test_duplicates_inside_train(tmp_path: Path, model: Path) -> None:
    samples = distinct(20)
    rows(tmp_path / "train.jsonl", *samples, *samples[:4])
    found = look(tmp_path, model)
    assert problems(found) == ["duplicates"]
    assert "4 (16.7%) of 24 samples repeat another one" in found["duplicates"].text
    assert f"{tmp_path}/train.jsonl:21 = {tmp_path}/train.jsonl:1" in found["duplicates"].text


def test_a_mixture_repeats_on_purpose(tmp_path: Path, model: Path) -> None:
    one = rows(tmp_path / "one.jsonl", *distinct(5))
    other = rows(tmp_path / "other.jsonl", *distinct(5, first=50))
    parts = [{"source": one, "percent": 90}, {"source": other, "percent": 10}]
    found = look(tmp_path, model, data={"train": {"kind": "mixture", "parts": parts, "samples": 100}, "holdout": 0.2})
    assert problems(found) == []
    assert "mixture: 90 %" in found["source"].text


def test_validation_that_is_trained_on(tmp_path: Path, model: Path) -> None:
    samples = distinct(30)
    rows(tmp_path / "train.jsonl", *samples)
    other = rows(tmp_path / "other.jsonl", *distinct(10, first=60), samples[7], samples[3])
    found = look(tmp_path, model, data={"validation": other})
    assert problems(found) == ["leakage"]
    text = found["leakage"].text
    assert "2 (16.7%) of 12 samples of validation are among 30 samples of train" in text
    assert f"{other}:11 = {tmp_path}/train.jsonl:8" in text
    assert look(tmp_path, model, data={"validation": str(tmp_path / "train.jsonl")})["leakage"].text.startswith(
        "30 (100.0%)"
    )


def test_a_large_store_is_read_in_part(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(tmp_path / "train.jsonl", *distinct(60))
    monkeypatch.setattr(data, "MOST_READ", 20)
    found = look(tmp_path, model, data={"holdout": 0.5})
    assert found["masked labels"].text.endswith("(20 samples drawn evenly from 30)")
    assert (
        "of 20 samples drawn evenly from 30 of validation are among 20 samples drawn evenly from 30 of train"
        in found["leakage"].text
    )
    monkeypatch.setattr(data, "MOST_TOKENS", 40)
    assert "5 samples drawn evenly from 60" in look(tmp_path, model)["masked labels"].text


def test_validation_smaller_than_a_batch_is_a_note(tmp_path: Path, model: Path) -> None:
    rows(tmp_path / "train.jsonl", *distinct(40))
    found = look(tmp_path, model, data={"holdout": 0.05}, evaluate={"per_device": 8})
    assert problems(found) == []
    assert found["validation"].text.endswith("; less than one batch of 8")
