"""The GitHub workflow, the commit hooks and `.ci/run` call the same tools: those of the Makefile."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_workflow_runs_exactly_the_targets_of_ci() -> None:
    targets = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    workflow = read(".github/workflows/ci.yml")
    assert True in workflow, "YAML 1.1 reads the key `on` as true"
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"]["target"] == targets
    command = 'sudo env "PATH=$PATH" CI=true make ${{ matrix.target }}'
    assert [step["run"] for step in job["steps"] if "run" in step] == [command]
    for target in targets:
        assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE), target


def test_the_workflow_uses_a_python_that_the_package_supports() -> None:
    settings = [step["with"] for step in read(".github/workflows/ci.yml")["jobs"]["test"]["steps"] if "with" in step]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={settings[0]['python-version']}"


def test_hooks_are_commands_of_make_check() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
    assert recipe is not None
    checks = recipe[1].replace("$(BIN)", ".venv/bin").replace(" --check", "").split("\n")
    repos = read(".pre-commit-config.yaml")["repos"]
    assert [repo["repo"] for repo in repos] == ["local"], "hooks of other repositories need a network"
    for hook in repos[0]["hooks"]:
        assert hook["language"] == "system", "the tools of .venv, so that a commit and `make check` agree"
        command = hook["entry"].replace(" --fix", "")
        assert any(line.strip().removesuffix(" .") == command for line in checks), hook["entry"]
