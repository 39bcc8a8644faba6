"""The pages of engines: their files fit the published schemas, and their commands do what the page says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.dialects import engine_nodes
from fullshard.submit.kubernetes import Kubernetes
from fullshard.submit.options import option_names
from tests.docs.pages import ROOT, blocks
from tests.small import model_folder, recipe, token_file
from tests.unit.submit.published import validate

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("kubernetes", "skypilot", "dstack")}
SUBMISSIONS = [
    line
    for block in blocks("bash", PAGES["kubernetes"])
    for line in block.splitlines()
    if line.startswith("fullshard submit")
]


@pytest.mark.parametrize(
    ("page", "schema"), [("kubernetes", "trainjob"), ("skypilot", "skypilot"), ("dstack", "dstack")]
)
def test_the_file_fits_the_published_schema(page: str, schema: str) -> None:
    (text,) = blocks("yaml", PAGES[page])
    values = yaml.safe_load(text)
    validate(values, schema)
    with pytest.raises(jsonschema.ValidationError):
        validate({**values, "nods": 2, "spec": []}, schema)


@pytest.mark.parametrize("page", ["kubernetes", "skypilot", "dstack"])
def test_the_command_of_the_file_is_understood(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a dry run, on a recipe of the same name."""
    (text,) = blocks("yaml", PAGES[page])
    values = yaml.safe_load(text)
    commands = {
        "kubernetes": lambda: values["spec"]["trainer"]["command"],
        "skypilot": lambda: shlex.split(values["run"]),
        "dstack": lambda: shlex.split(values["commands"][-1]),
    }
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model", num_hidden_layers=1)
    token_file(tmp_path / "train.jsonl", records=16)
    Path("recipe.yaml").write_text(json.dumps(recipe(tmp_path, name="a")))
    program, *words = commands[page]()
    assert program == "fullshard"
    words = [word.replace("s3://my-bucket", "memory://bucket") for word in words]
    done = CliRunner().invoke(app, [*words, "--dry-run"])
    assert done.exit_code == 0, done.output


def test_skypilot_recovers_what_was_saved() -> None:
    (text,) = blocks("yaml", PAGES["skypilot"])
    values = yaml.safe_load(text)
    assert values["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    (mounted,) = values["file_mounts"]
    assert f"--output {mounted}" in values["run"]


@pytest.mark.parametrize("line", SUBMISSIONS)
def test_the_commands_for_kubernetes_write_a_job(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = recipe(tmp_path, name="a", output="runs", topology={"device": "auto"}, batch={"global": None})
    Path("recipe.yaml").write_text(json.dumps(values))
    words = shlex.split(line)[1:]
    done = CliRunner().invoke(app, [*words, *([] if "--dry-run" in words else ["--dry-run"])])
    assert done.exit_code == 0, done.stderr
    kinds = [each["kind"] for each in yaml.safe_load_all(done.stdout)]
    assert kinds[1:] == (["JobSet"] if "jobset" in words else ["TrainingRuntime", "TrainJob"])


def test_the_page_names_every_option() -> None:
    named = set(re.findall(r"--[a-z][a-z-]*", PAGES["kubernetes"]))
    assert set(option_names(Kubernetes)) <= named
    assert named <= {*option_names(Kubernetes), "--on", "--nodes", "--devices", "--restarts", "--dry-run"}


@pytest.mark.parametrize(
    ("page", "prefix", "read"),
    [("kubernetes", "PET_", 5), ("skypilot", "SKYPILOT_", 4), ("dstack", "DSTACK_", 4)],
)
def test_the_variables_are_those_that_are_read(page: str, prefix: str, read: int) -> None:
    code = Path(engine_nodes.__file__).read_text()
    named = set(re.findall(rf"{prefix}[A-Z_]+", PAGES[page]))
    assert named == set(re.findall(rf"{prefix}[A-Z_]+", code))
    assert len(named) == read
