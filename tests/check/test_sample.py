"""`check --sample N` prints one sample and starts no ranks; a wrong N prints how many there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.check.healthy_recipe import Seed, healthy_place, seed_in


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy_place(tmp_path_factory.mktemp("healthy"))


@pytest.fixture
def seed(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seed:
    return seed_in(tmp_path / "case", place, monkeypatch)


def test_a_sample_is_printed(seed: Seed) -> None:
    seed.speak()
    seed.lines(*[{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(4)], name="pairs.jsonl")
    seed.set("data", holdout=0)
    result = seed.ask("check", "--sample", "2")
    first, second, *_ = result.stdout.splitlines()
    assert result.exit_code == 0
    assert first == f"Sample 2 of 4, from {seed.folder}/pairs.jsonl:3"
    assert " trained on (marked T)" in second
    found = json.loads(seed.ask("check", "--sample", "2", "--json").stdout)
    trained = [token["target"] for token in found["tokens"] if token["target"] is not None]
    assert "".join(trained).replace("·", " ").strip().startswith("It is 2.")
    assert sum(part["tokens"] for part in found["passages"]) == len(found["tokens"])


@pytest.mark.parametrize("number", [4, -1])
def test_a_number_that_does_not_exist(seed: Seed, number: int) -> None:
    seed.lines(*[{"input_ids": [1, 2, 3]}] * 4)
    seed.set("data", holdout=0)
    result = seed.ask("check", "--sample", str(number))
    said = " ".join(result.stdout.split())
    assert result.exit_code == 2
    assert f"--sample {number}: the training data has 4 samples, numbered from 0. Use a number from 0 to 3." in said


def test_data_that_cannot_be_read(seed: Seed) -> None:
    seed.lines({"input_ids": [1, 2]}, {"input_ids": "words"})
    result = seed.ask("check", "--sample", "0")
    assert result.exit_code == 2
    assert "train.jsonl:2" in result.stdout
    assert "Traceback" not in result.output
