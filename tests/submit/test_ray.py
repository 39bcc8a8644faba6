"""Runs on a real Ray of this machine, with two workers on the CPU: equal to `fullshard train` on two ranks, bit by bit.

One Ray serves all tests of the file, and ends with them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

import fullshard
from fullshard.checkpoint import integrity
from fullshard.log.metrics import FILE, read
from tests.docs.pages import ROOT, blocks
from tests.small import curve, model_folder, recipe, token_file
from tests.submit.ray_cluster import Cluster, started

pytestmark = pytest.mark.slow
STEPS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    model_folder(folder / "model")
    token_file(folder / "train.jsonl", records=64)
    return folder


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    two = {"device": "cpu", "devices": 2}
    usual: dict[str, Any] = {"duration": {"steps": STEPS}, "checkpoint": {"every_steps": 2}}
    base = recipe(folder, name=name, topology=two, **usual | sections)
    return base | {"output": "runs"}  # relative: where it was submitted


@pytest.fixture(scope="module")
def straight(folder: Path) -> list[tuple[float, ...]]:
    """The losses of an uninterrupted run on two ranks that fullshard starts."""
    result = fullshard.train(settings(folder, "straight") | {"output": str(folder / "runs")})
    losses = curve(result.metrics, "step", "loss", "grad_norm")
    assert len(losses) == STEPS
    return losses


def losses(run: Path) -> list[tuple[float, ...]]:
    return curve(read(run / FILE), "step", "loss", "grad_norm")


def call(*words: str, folder: Path, cluster: Cluster) -> str:
    done = subprocess.run(words, cwd=folder, env=cluster.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for(found: Callable[[], Any], what: str, *, seconds: float = 400) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {seconds} s")


def drive(text: str, *, folder: Path, cluster: Cluster, **values: Any) -> dict[str, Any]:
    """Runs a driver script of a user, which ends with a line of JSON."""
    script = folder / "driver.py"
    script.write_text(DRIVER.replace("# train", text))
    done = subprocess.run(
        [sys.executable, script, json.dumps(values)], cwd=folder, env=cluster.environ, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


DRIVER = """
import json, os, signal, sys
import ray
from pathlib import Path
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def train(config):
    import fullshard, ray.train, torch.distributed as dist
    rank = ray.train.get_context().get_world_rank()
    # train
    return {"step": result.step, "stopped": result.stopped, "group": dist.is_initialized()}

values = json.loads(sys.argv[1])
ray.init(log_to_driver=False, logging_level="error")
trainer = TorchTrainer(
    train,
    train_loop_config=values,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name=values["name"], storage_path=values["storage"], failure_config=FailureConfig(max_failures=1)
    ),
)
result = trainer.fit()
checkpoint = result.checkpoint and result.checkpoint.path
every = [path.path for path, _ in result.best_checkpoints or []]
found = {"metrics": result.metrics, "checkpoint": checkpoint, "every": every, "returned": result.return_value}
print(json.dumps(found))
"""

KILLED_ONCE = """
    asked, marker = [], Path(config["marker"])
    def stop():
        asked.append(True)
        if rank == 1 and len(asked) == 5 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return False
    result = fullshard.train(config["recipe"], stop=stop)
"""


def test_a_killed_worker_is_restarted_and_ends_like_a_straight_run(
    folder: Path, cluster: Cluster, straight: list[tuple[float, ...]]
) -> None:
    """Rank 1 is killed in step 5. Ray restarts both, and they resume from checkpoint-4."""
    wanted = settings(folder, "killed") | {"output": str(folder / "runs")}
    marker, storage = folder / "killed-once", folder / "storage"
    values = {"name": "killed", "marker": str(marker), "storage": str(storage), "recipe": wanted}
    found = drive(KILLED_ONCE.strip(), folder=folder, cluster=cluster, **values)
    run = folder / "runs" / "killed"
    assert marker.exists()
    assert "Resuming from" in (run / "log.txt").read_text()
    assert losses(run) == straight
    assert found["returned"] == {"step": STEPS, "stopped": "done", "group": True}
    assert found["metrics"]["checkpoint"] == str(run / "checkpoint-8")
    assert (found["metrics"]["step"], found["metrics"]["train/loss"]) == (STEPS, straight[-1][1])
    kept = Path(found["checkpoint"])
    assert kept.is_relative_to(storage / "killed")
    assert kept.name == "checkpoint-8"
    assert integrity.problems(kept) == []
    assert (kept / "manifest.json").samefile(run / "checkpoint-8" / "manifest.json")  # linked, not copied


UNTIL_HEARD = """
import sys, time
import ray
from ray.experimental.internal_kv import _internal_kv_get
ray.init(log_to_driver=False, logging_level="error")
while _internal_kv_get(sys.argv[1], namespace="fullshard") is not None:
    time.sleep(0.1)
"""
"""Waits until the worker of rank 0 has taken the request to stop the run in this folder."""


def test_a_submitted_job_stops_with_a_save_and_goes_on(
    folder: Path, cluster: Cluster, straight: list[tuple[float, ...]]
) -> None:
    """`ray job stop` lets the run save; submitted again, it ends like a straight run."""
    held = {"kind": "tests.submit.held_objective.Held", "folder_of_test": str(folder), "hold": [3]}
    wanted = settings(folder, "job", objective=held | {"run": str(folder / "runs" / "job")})
    (folder / "job.yaml").write_text(yaml.safe_dump(wanted))
    run, submit = folder / "runs" / "job", ["submit", "job.yaml", "--on", "ray", "--address", cluster.dashboard]
    said = call(sys.executable, "-m", "fullshard", *submit, "--no-check", folder=folder, cluster=cluster)
    assert "submitted   job raysubmit_" in said
    commands = {line.split("  ray ")[0].strip(): f"ray {line.split('  ray ')[1]}" for line in said.splitlines()[-3:]}
    wait_for((folder / "held-3").exists, "step 3")
    assert "RUNNING" in call(*commands["look"].split(), folder=folder, cluster=cluster)
    stopping = subprocess.Popen(commands["save, stop"].split(), env=cluster.environ, stdout=subprocess.DEVNULL)
    logs = commands["output"].replace(" --follow", "").split()
    wait_for(lambda: "A second signal stops at once" in call(*logs, folder=folder, cluster=cluster), "the request")
    call(sys.executable, "-c", UNTIL_HEARD, str(run.resolve()), folder=folder, cluster=cluster)
    (folder / "go-3").touch()
    assert stopping.wait(300) == 0
    said = call(*logs, folder=folder, cluster=cluster)
    assert "Stopped at step" in said
    assert "no longer" not in said  # Ray was told about everything
    assert list((run / "submit-1" / "ray").glob("*/checkpoint-*/manifest.json"))
    ended = read(run / FILE)[-1]
    assert (ended["event"], ended["stopped"], ended["step"]) == ("finished", "signal", 6)
    assert (run / f"checkpoint-{ended['step']}" / "manifest.json").exists()

    said = call(sys.executable, "-m", "fullshard", *submit, "--no-check", folder=folder, cluster=cluster)
    status = next(line for line in said.splitlines() if line.startswith("  look")).split()[1:]
    wait_for(lambda: "succeeded" in call(*status, folder=folder, cluster=cluster), "the end")
    assert losses(run) == straight


def ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_driver_on_this_machine_stops_with_a_save_and_goes_on(
    folder: Path, cluster: Cluster, straight: list[tuple[float, ...]]
) -> None:
    """Without an address the driver is a process here, and the `kill` that is printed lets the run save."""
    (folder / "here").mkdir()
    run = folder / "runs" / "here"
    held = {"kind": "tests.submit.held_objective.Held", "folder_of_test": str(folder / "here"), "hold": [3]}
    (folder / "here.yaml").write_text(yaml.safe_dump(settings(folder, "here", objective=held | {"run": str(run)})))
    words = [sys.executable, "-m", "fullshard", "submit", "here.yaml", "--on", "ray", "--no-check"]
    said = call(*words, folder=folder, cluster=cluster)
    look, output, stop = (re.split(r"  +", line.strip(), maxsplit=1)[1].split() for line in said.splitlines()[-3:])
    wait_for((folder / "here" / "held-3").exists, "step 3")
    call(*look, folder=folder, cluster=cluster)  # ps fails without a process of this number
    assert stop == ["kill", look[-1]]
    call(*stop, folder=folder, cluster=cluster)
    log = Path(output[-1])
    wait_for(lambda: "A second signal stops at once" in log.read_text(), "the request")
    call(sys.executable, "-c", UNTIL_HEARD, str(run.resolve()), folder=folder, cluster=cluster)
    (folder / "here" / "go-3").touch()
    wait_for(lambda: "Stopped at step 6, and saved." in log.read_text(), "the save")
    assert (run / "checkpoint-6" / "manifest.json").exists()

    again = call(*words, folder=folder, cluster=cluster)
    wait_for(lambda: ended(int(again.split()[-1])), "the end")
    assert losses(run) == straight


def test_a_mistake_that_one_rank_meets_is_final(folder: Path, cluster: Cluster) -> None:
    """The other rank loses it, so Ray starts both again; they say what was wrong, and train no step."""
    run = folder / "runs" / "mistake"
    fails = {"kind": "tests.submit.held_objective.Held", "folder_of_test": str(folder), "run": str(run)}
    fails |= {"fail": 2, "fail_on": 1}
    (folder / "mistake.yaml").write_text(yaml.safe_dump(settings(folder, "mistake", objective=fails)))
    words = [sys.executable, "-m", "fullshard", "submit", "mistake.yaml", "--on", "ray", "--no-check"]
    said = call(*words, folder=folder, cluster=cluster).splitlines()
    wait_for(lambda: ended(int(said[-1].split()[-1])), "the end")
    log = Path(said[-2].split()[-1]).read_text()
    assert "a mistake on purpose." in log.splitlines(), "a line of the driver, beside those of Ray"
    assert "The run failed on Ray" not in log
    assert (run / "log.txt").read_text().count("Started Training on") == 1, "the second start trained nothing"


def test_a_relative_run_folder_is_refused(folder: Path, cluster: Cluster) -> None:
    text = """
    try:
        result = fullshard.train(config["recipe"])
    except fullshard.SetupError as error:
        return str(error)
    """.strip()
    values = {"name": "lost", "storage": str(folder / "storage"), "recipe": settings(folder, "lost")}
    found = drive(text, folder=folder, cluster=cluster, **values)
    assert "output = 'runs' is relative, and Ray runs its workers in" in found["returned"]


def test_the_code_of_the_page(folder: Path, cluster: Cluster) -> None:
    code = blocks("python", (ROOT / "docs" / "ray.md").read_text())[0]
    (folder / "page.yaml").write_text(yaml.safe_dump(settings(folder, "page", duration={"steps": 2})))
    names = f"RECIPE, SHARED_FOLDER = {str(folder / 'page.yaml')!r}, {str(folder / 'shared')!r}\n"
    (folder / "page.py").write_text(names + code)
    said = call(sys.executable, "page.py", folder=folder, cluster=cluster).splitlines()[-1]
    assert said.startswith(f"{folder}/shared/my-model/")
    assert f"/checkpoint-2 {losses(folder / 'shared' / 'page')[-1][1]}" in said


DRAINED = """
    asked, log = [], Path(config["recipe"]["output"], "drained", "log.txt")
    def stop():
        asked.append(True)
        if rank == 0 and len(asked) == 2:
            import subprocess, time
            node = ray.get_runtime_context().get_node_id()
            words = [config["tool"], "drain-node", "--address", config["gcs"], "--node-id", node]
            words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
            words += ["--deadline-remaining-seconds", "600"]
            subprocess.run(words, check=True)
            while "Ray will remove a node" not in log.read_text():
                time.sleep(0.1)
        return False
    result = fullshard.train(config["recipe"], stop=stop)
"""


def test_a_node_that_ray_takes_away_is_saved_from(folder: Path, cluster: Cluster) -> None:
    """The last test: afterwards the only node takes no more work. Ray says that it takes the node away in ten minutes;
    the run saves, once, and goes on."""
    wanted = settings(folder, "drained", duration={"steps": 14}) | {"output": str(folder / "runs")}
    wanted["checkpoint"] = {"every_steps": None, "every_epochs": None, "best": None}
    values = {"gcs": cluster.gcs, "tool": str(Path(sys.executable).parent / "ray"), "recipe": wanted}
    found = drive(
        DRAINED.strip(), folder=folder, cluster=cluster, name="drained", storage=str(folder / "storage"), **values
    )
    saved = [record["step"] for record in read(folder / "runs" / "drained" / FILE) if record.get("event") == "saved"]
    assert len(saved) == 2
    assert 2 < saved[0] < saved[1] == 14
    assert found["returned"]["stopped"] == "done"
    assert Path(found["every"][0]).name == f"checkpoint-{saved[0]}"
