"""`fullshard submit --on ray` before anything reaches Ray: its options, and the driver that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.submit import ray


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)


def submit(*words: str, recipe: str = "quickstart") -> Any:
    return CliRunner().invoke(app, ["submit", recipe, "--on", "ray", "--no-check", *words], catch_exceptions=False)


def driver(*words: str, **how: Any) -> str:
    done = submit("--dry-run", *words, **how)
    assert done.exit_code == 0, done.output
    return str(done.stdout)


def refused(*words: str) -> str:
    done = submit(*words)
    assert done.exit_code == 2, done.output
    assert not Path("runs").exists(), "something was written"
    return str(done.stderr)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ((), ray.RESTARTS),
        (("--restarts", "5"), 5),
        (("--max-restarts", "5"), 5),
        (("topology.restarts=5",), 5),
        (("--restarts", "0"), 0),
    ],
)
def test_ray_restarts_the_workers_as_often_as_it_is_told(words: tuple[str, ...], number: int) -> None:
    assert f"FailureConfig(max_failures={number})" in driver(*words)


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the `ray` command; tests/submit has a real one."""
    program = tmp_path / "bin" / "ray"
    program.parent.mkdir()
    program.write_text("#!/bin/bash\necho \"Job 'raysubmit_42' submitted\"\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def test_the_ranks_of_ray_do_not_restart_themselves(tool: Path) -> None:
    words = ("--restarts", "5", "--address", "http://127.0.0.1:8265")
    for recipe in ("quickstart", "staged"):
        done = submit(*words, recipe=recipe)
        assert done.exit_code == 0, done.output
        saved = yaml.safe_load(Path(f"runs/{recipe}/submit-1/recipe.yaml").read_text())
        assert {each["topology"]["restarts"] for each in saved["stages"] or [saved]} == {None}


def test_help_says_what_restarts_does() -> None:
    assert "--restarts N (default 3)" in CliRunner().invoke(app, ["submit", "--help-on", "ray"]).stdout


def test_workers_that_cannot_share_a_step() -> None:
    assert "batch.global = 4 cannot be split evenly: 3 ranks" in refused("--workers", "3")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ("--workers", "3", "--nodes", "2", "--devices", "2"),
            "--workers 3 and --nodes 2 --devices 2 contradict each other: 3 workers are not 2 nodes with 2 ranks each",
        ),
        (("--workers", "4", "topology.devices=1"), "--workers 4 and --devices 1 contradict each other"),
        (("--workers", "3", "--nodes", "2", "topology.devices=auto"), "3 workers are not 2 nodes with as many ranks"),
        (("--address", "foo"), "--address foo is not the address of a Ray cluster. Write that of its dashboard: http:"),
        (("--address", "http://"), "--address http:// is not the address"),
        (("--address", "http://head:dash"), "--address http://head:dash is not the address"),
    ],
)
def test_options_that_cannot_be_meant(words: tuple[str, ...], problem: str) -> None:
    assert problem in refused("--dry-run", "batch.global=null", *words)


def test_the_variable_with_a_bad_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "head")
    assert "RAY_API_SERVER_ADDRESS=head is not the address" in refused("--dry-run")


@pytest.mark.parametrize("address", ["auto", "http://head:8265", "https://ray.example/api", "ray://h:10001", "h:6379"])
def test_addresses_of_ray(address: str) -> None:
    assert "num_workers=2" in driver("--address", address)


def test_workers_win_over_the_recipe() -> None:
    assert "num_workers=1," in driver("--workers", "1")
    assert "num_workers=4," in driver("--workers", "4", "--nodes", "2", "batch.global=null")


TRACEBACK = """Traceback (most recent call last):
  File "dashboard_sdk.py", line 300, in _check_connection_and_version_with_url
    raise ConnectionError(
"""


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "ConnectionError: Failed to connect to Ray at address: http://h:8265.",
            "Error: No Ray cluster answers at http://h:8265. Start it with ray start --head, or correct the address",
        ),
        ("RuntimeError: the runtime_env is invalid.", "Error: ray refused the job: RuntimeError: the runtime_env is"),
    ],
)
def test_no_traceback_of_ray_is_printed(tool: Path, said: str, message: str) -> None:
    tool.write_text(f"#!/bin/bash\ncat >&2 <<'END'\n{TRACEBACK}{said}\nEND\nexit 1\n")
    done = submit("--address", "http://h:8265")
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output
