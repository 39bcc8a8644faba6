"""The pods of a JobSet as processes on this machine, replaced by the rules of the manifest as a cluster would do it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.log.metrics import FILE, read
from tests.small import model_folder, recipe, token_file

ROOT = Path(__file__).parents[2]
STEPS = 100


def manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """The job of a JobSet that `fullshard submit` writes, and its recipe."""
    words = ["submit", str(folder / "recipe.yaml"), "--on", "kubernetes", "--api", "jobset", "--image", "i"]
    done = CliRunner().invoke(
        app, [*words, "--volume", f"claim:{folder}", "--nodes", "2", "--devices", "1", "--dry-run"]
    )
    assert done.exit_code == 0, done.stderr
    configuration, jobset = yaml.safe_load_all(done.stdout)
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"], configuration["data"]["recipe.yaml"]


class Job:
    """The pods of a job, by index."""

    def __init__(self, folder: Path, spec: dict[str, Any], recipe_text: str) -> None:
        self.rules = spec["podFailurePolicy"]["rules"]
        (self.container,) = spec["template"]["spec"]["containers"]
        self.recipe, self.folder = folder / "mounted.yaml", folder
        self.recipe.write_text(recipe_text)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.ended: dict[int, list[int]] = {0: [], 1: []}
        self.pods = {index: self.start(index) for index in self.ended}

    def start(self, index: int) -> subprocess.Popen[str]:
        program, *words = self.container["command"]
        assert program == "fullshard"
        words = [str(self.recipe) if word == "/etc/fullshard/recipe.yaml" else word for word in words]
        own = {"PET_NODE_RANK": str(index), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(self.port)}
        said = {each["name"]: own.get(each["name"], each.get("value", "")) for each in self.container["env"]}
        with (self.folder / f"pod-{index}-{len(self.ended[index])}.txt").open("w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "fullshard", *words],
                cwd=self.container["workingDir"],
                env={**os.environ, "PYTHONPATH": str(ROOT), **said},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )

    def action(self, code: int) -> str:
        """What the rules say about an exit code."""
        return next(
            (rule["action"] for rule in self.rules if code in rule.get("onExitCodes", {}).get("values", [])), ""
        )

    def look(self) -> bool:
        """Replaces what the rules replace, each pod by itself; whether pods still run."""
        for index, pod in list(self.pods.items()):
            if (code := pod.poll()) is None:
                continue
            del self.pods[index]
            self.ended[index].append(code)
            if code and code != -signal.SIGKILL and self.action(code) != "Ignore":
                raise AssertionError(f"pod {index} ended with {code}: {self.texts()}")
            if code:
                self.pods[index] = self.start(index)
        return bool(self.pods)

    def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self.look(), self.texts()
            time.sleep(0.05)

    def evict(self, index: int) -> None:
        """The cluster's patience with a pod that it told to stop is over. Whatever its exit code, it is replaced."""
        (rule,) = [rule for rule in self.rules if "onPodConditions" in rule]
        assert rule["action"] == "Ignore"
        assert {condition["type"] for condition in rule["onPodConditions"]} == {"DisruptionTarget"}
        os.killpg(self.pods[index].pid, signal.SIGKILL)

    def texts(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("pod-*.txt")))

    def kill(self) -> None:
        for pod in self.pods.values():
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)
                pod.wait()


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["all end together", "node 0 ends later"])
def test_a_pod_that_is_told_to_stop_is_replaced_and_nothing_is_lost(tmp_path: Path, late: bool) -> None:
    model_folder(tmp_path / "model", num_hidden_layers=1)
    token_file(tmp_path / "train.jsonl", records=64)
    here = {"folder_of_test": str(tmp_path)}
    held = {"kind": "tests.submit.held_objective.Held", **here, "run": str(tmp_path / "runs" / "pods"), "hold": [5]}
    sinks = [{"kind": "tests.submit.held_objective.Late", **here}] if late else []
    sections = {"objective": held, "log": {"sinks": sinks}, "topology": {"device": "cpu", "timeout_s": 600}}
    values = recipe(tmp_path, name="pods", duration={"steps": STEPS}, **sections)
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    job = Job(tmp_path, *manifest(tmp_path))
    try:
        job.until((tmp_path / "held-5").exists)
        job.pods[1].send_signal(signal.SIGTERM)  # a node is drained: one pod hears of it
        time.sleep(2)  # its rank hears of it, long before the last step
        (tmp_path / "go-5").touch()
        if late:
            job.until((tmp_path / "late").exists)
            job.evict(1)
            job.until(lambda: "the run before still ends there" in job.texts())
            (tmp_path / "go").touch()
        while job.look():
            time.sleep(0.05)
    finally:
        job.kill()
    assert job.ended == {0: [75, 0], 1: [-signal.SIGKILL if late else 75, 0]}, job.texts()
    command = [sys.executable, "-m", "fullshard", "train", "recipe.yaml", "--devices", "2", "name=straight"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stopped, straight = (losses(tmp_path / "runs" / name / FILE) for name in ("pods", "straight"))
    assert len(straight) == STEPS
    assert stopped == straight


def losses(path: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read(path) if record["kind"] == "train"}
