"""`check --sample N` prints one sample and starts no ranks; a wrong N prints how many there are."""

from __future__ import annotations

import json

import pytest

from tests.check.healthy_recipe import Workspace


def test_a_sample_is_printed(workspace: Workspace) -> None:
    workspace.use_texts()
    workspace.write_records(
        *[{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(4)], name="pairs.jsonl"
    )
    workspace.set("data", holdout=0)
    result = workspace.run("check", "--sample", "2")
    first, second, *_ = result.stdout.splitlines()
    assert result.exit_code == 0
    assert first == f"Sample 2 of 4, from {workspace.folder}/pairs.jsonl:3"
    assert " trained on (marked T)" in second
    found = json.loads(workspace.run("check", "--sample", "2", "--json").stdout)
    trained = [token["target"] for token in found["tokens"] if token["target"] is not None]
    assert "".join(trained).replace("·", " ").strip().startswith("It is 2.")
    assert sum(part["tokens"] for part in found["passages"]) == len(found["tokens"])


@pytest.mark.parametrize("number", [4, -1])
def test_a_number_that_does_not_exist(workspace: Workspace, number: int) -> None:
    workspace.write_records(*[{"input_ids": [1, 2, 3]}] * 4)
    workspace.set("data", holdout=0)
    result = workspace.run("check", "--sample", str(number))
    said = " ".join(result.stdout.split())
    assert result.exit_code == 2
    assert f"--sample {number}: the training data has 4 samples, numbered from 0. Use a number from 0 to 3." in said


def test_data_that_cannot_be_read(workspace: Workspace) -> None:
    workspace.write_records({"input_ids": [1, 2]}, {"input_ids": "words"})
    result = workspace.run("check", "--sample", "0")
    assert result.exit_code == 2
    # A long path is broken at the width of the terminal.
    assert "train.jsonl:2:" in "".join(result.stdout.split())
    assert "Traceback" not in result.output
