from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.config.part import decode
from fullshard.contracts.sink import Sink
from fullshard.errors import RecipeError, SetupError
from fullshard.log.all_sinks import Sinks
from fullshard.sinks.wandb import WeightsAndBiases

RUN = """
import json, sys
from pathlib import Path
from fullshard.log.metrics import Metrics
from fullshard.config.part import decode
from fullshard.contracts.sink import Sink

folder, resume = Path(sys.argv[1]), int(sys.argv[2])
metrics = Metrics(folder / "metrics.jsonl", step=resume)
given = {"project": "p", "tags": ["fsdp", "multi-node"], "mode": "offline", "run-name": "shown"}
settings = {"kind": "wandb", **(given if len(sys.argv) < 4 else json.loads(sys.argv[3]))}
sink = decode(Sink, settings, where="log.sinks[0]").open(folder, name="run", recipe={"seed": 7})
for step in (resume + 1, resume + 2):
    record = {"kind": "train", "step": step, "loss": 0.5 * step, "time": {"data": 0.25}}
    metrics.write(record)
    sink.write(record)
run = sink._run
answer = {"id": run.id, "name": run.name, "tags": list(run.tags), "config": dict(run.config)}
answer |= {"project": run.project, "offline": run.offline, "group": run.group}
answer["summary"] = {key: run.summary[key] for key in ("train/loss", "time/data", "step")}
sink.close()
metrics.close()
print(json.dumps(answer))
"""


def run_offline(root: Path, *words: str, resume: int, **variables: str) -> dict[str, object]:
    """A run in a separate process, with a home, a temporary and a working folder to look into afterwards."""
    places = {name: root / name for name in ("home", "tmp", "cwd", "run")}
    for place in places.values():
        place.mkdir(exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "XDG"))}
    environment = clean | {
        "HOME": str(places["home"]),
        "TMPDIR": str(places["tmp"]),
        "PYTHONPATH": os.getcwd(),
        "PYTHONDONTWRITEBYTECODE": "1",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN, str(places["run"]), str(resume), *words],
        cwd=places["cwd"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    answer: dict[str, object] = json.loads(line)
    return answer


def test_offline_it_runs_without_a_network_and_leaves_nothing_outside_the_run_folder(tmp_path: Path) -> None:
    first = run_offline(tmp_path, resume=0)
    assert first["name"] == "shown"
    assert sorted(first["tags"]) == ["fsdp", "multi-node"]  # type: ignore[call-overload]
    assert first["config"] == {"seed": 7}
    assert first["summary"] == {"train/loss": 1.0, "time/data": 0.25, "step": 2}
    for outside in ("home", "tmp", "cwd"):
        assert [p for p in (tmp_path / outside).rglob("*") if p.is_file()] == []
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))) == 1

    resumed = run_offline(tmp_path, resume=2)
    assert resumed["id"] == first["id"]

    afresh = run_offline(tmp_path, resume=0)
    assert afresh["id"] != first["id"]


VARIABLES = {
    "WANDB_MODE": "offline",
    "WANDB_PROJECT": "theirs",
    "WANDB_NAME": "named",
    "WANDB_TAGS": "a,b",
    "WANDB_RUN_GROUP": "sweep",
    "WANDB_RUN_ID": "chosen",
}


def test_wandb_variables_apply_if_the_recipe_is_silent(tmp_path: Path) -> None:
    found = run_offline(tmp_path, "{}", resume=0, **VARIABLES)
    assert (found["offline"], found["project"], found["name"], found["group"]) == (True, "theirs", "named", "sweep")
    assert (sorted(found["tags"]), found["id"]) == (["a", "b"], "chosen")  # type: ignore[call-overload]


def test_the_recipe_overrides_wandb_variables_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = '{"project": "ours", "mode": "offline"}'
    found = run_offline(tmp_path, given, resume=0, **{**VARIABLES, "WANDB_MODE": "online"})
    assert (found["offline"], found["project"], found["name"]) == (True, "ours", "named")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SetupError, match="pip install"):
        Sinks([WeightsAndBiases(project="ours", mode="online")], tmp_path, name="run", recipe={}, warn=said.append)
    assert said == [
        "log.sinks[0] (wandb): mode = online overrides WANDB_MODE=disabled.",
        "log.sinks[0] (wandb): project = ours overrides WANDB_PROJECT=theirs.",
    ]
    # Disabled by the variable: needs no package.
    WeightsAndBiases().open(tmp_path / "none", name="run", recipe={}).close()
    assert not (tmp_path / "none").exists()


def test_settings_are_checked() -> None:
    with pytest.raises(RecipeError, match=r"log\.sinks\[0\]\.mode"):
        decode(Sink, {"kind": "wandb", "mode": "of-line"}, where="log.sinks[0]")
    with pytest.raises(RecipeError, match=r"log\.sinks\[0\]\.projekt .*did you mean 'project'"):
        decode(Sink, {"kind": "wandb", "projekt": "p"}, where="log.sinks[0]")


def test_disabled_needs_no_package_and_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    sink = WeightsAndBiases(mode="disabled").open(tmp_path, name="run", recipe={})
    sink.write({"kind": "train", "step": 1, "loss": 1.0})
    sink.close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_gives_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SetupError, match=r"pip install 'fullshard\[wandb\]'"):
        Sinks([WeightsAndBiases()], tmp_path, name="run", recipe={}, warn=lambda line: None)


def test_online_without_a_key_stops_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(SetupError, match="wandb login.*mode: offline"):
        WeightsAndBiases().open(tmp_path / "run", name="run", recipe={})
    assert "WANDB_CACHE_DIR" not in os.environ
