"""Stop signals in every phase of the real command, to one process, one rank or the whole group, under every launcher.

No test waits for a time: each phase says that it is there, and then the signal comes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.slow import only_first
from tests.small import model_folder, recipe, token_file

ROOT = Path(__file__).parents[2]
TOKENISE = "fullshard.setup.run_inputs:prepare_data"
MEET = "fullshard.dist.world:join"
LOAD = "fullshard.build:build"
EVALUATE = "fullshard.evaluations.loss/Loss:run"
EXPORT = "fullshard.checkpoint.saver/Saver:export"
UNSAVED = "before the first step: nothing to save. Run the same command again.\n"
UNDER_WAY = ": saving after the step in progress. A second signal stops at once."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stop")
    model_folder(path / "model", num_hidden_layers=1)
    token_file(path / "train.jsonl", records=64)
    return path


class Run:
    """The command, waiting in a phase."""

    def __init__(self, process: subprocess.Popen[str], place: Path, run: Path) -> None:
        self.process, self.place, self.run = process, place, run

    def ranks(self, number: int, *, first: int = 0) -> list[int]:
        """The process ids of the ranks from `first` up to `number`, once they have come to the phase."""
        places = [self.place / str(rank) for rank in range(first, number)]
        while not all(path.exists() and path.read_text() for path in places):
            assert self.process.poll() is None, self.end()
            time.sleep(0.05)
        return [int(path.read_text()) for path in places]

    def go_on(self) -> None:
        (self.place / "go").touch()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate()
        return self.process.returncode, out, err


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Callable[..., Any]:
    @contextmanager
    def started(
        phase: str, *, launcher: tuple[str, ...] = (), environ: dict[str, str] | None = None, **sections: Any
    ) -> Any:
        settings = recipe(
            folder, name=tmp_path.name, objective={"kind": "tests.dist.pausing_objective.Paused"}, **sections
        )
        (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
        place = tmp_path / "phase"
        place.mkdir()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
        clean = {name: value for name, value in os.environ.items() if name not in names}
        process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "fullshard", "train", str(tmp_path / "recipe.yaml")],
            cwd=ROOT,
            env={**clean, "PYTHONPATH": str(ROOT), "PAUSE_IN": phase, "PAUSE_AT": str(place), **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield Run(process, place, folder / "runs" / tmp_path.name)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    return started


@pytest.mark.parametrize(
    ("phase", "number"),
    only_first([(TOKENISE, signal.SIGUSR1), (LOAD, signal.SIGUSR2)]),
    ids=["tokenising", "loading the model"],
)
def test_one_process_exits_with_75_and_a_message(start: Any, phase: str, number: signal.Signals) -> None:
    with start(phase) as run:
        run.ranks(1)
        run.process.send_signal(number)
        code, _, err = run.end()
        assert (code, err.splitlines(keepends=True)[-1]) == (75, f"Stopped by {number.name} {UNSAVED}")


def to_launcher(run: Run, ranks: list[int]) -> None:
    run.process.send_signal(signal.SIGTERM)


def to_group(run: Run, ranks: list[int]) -> None:
    os.killpg(run.process.pid, signal.SIGUSR1)


def to_one_rank(run: Run, ranks: list[int]) -> None:
    os.kill(ranks[1], signal.SIGUSR2)


@pytest.mark.parametrize("send", only_first([to_launcher, to_group, to_one_rank]))
def test_the_launcher_exits_with_75_when_its_ranks_do(start: Any, send: Callable[[Run, list[int]], None]) -> None:
    with start(MEET, topology={"devices": 2}) as run:
        ranks = run.ranks(2)
        send(run, ranks)
        code, _, err = run.end()
        assert code == 75
        said = [line for line in err.splitlines(keepends=True) if "Stopped by" in line]
        name = {to_launcher: "SIGTERM", to_group: "SIGUSR1", to_one_rank: "SIGUSR2"}[send]
        assert said == [f"Stopped by {name} {UNSAVED}"]
        assert "Traceback" not in err
        assert not [pid for pid in ranks if psutil.pid_exists(pid)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        ("-m", "accelerate.commands.launch", "--num_processes=2", "--num_machines=1", "--mixed_precision=no")
        + ("--dynamo_backend=no", "--multi_gpu"),
    ],
    ids=["torchrun", "accelerate"],
)
def test_ranks_of_another_launcher_print_the_message_once(start: Any, launcher: tuple[str, ...]) -> None:
    """The exit code of the whole is the launcher's own: both of them know 0 and 1."""
    with start(LOAD, launcher=launcher) as run:
        run.ranks(2)
        run.process.send_signal(signal.SIGTERM)
        code, _, err = run.end()
        assert code != 0
        assert err.count(f"Stopped by SIGTERM {UNSAVED}") == 1


def test_a_signal_during_an_evaluation_saves_the_run(start: Any, folder: Path) -> None:
    validated = {"data": {"validation": str(folder / "train.jsonl")}, "evaluate": {"parts": ["loss"], "every_steps": 2}}
    with start(EVALUATE, **validated) as run:
        [rank] = run.ranks(1)
        os.kill(rank, signal.SIGSTOP)  # so that both arrive together
        os.kill(rank, signal.SIGINT)
        os.killpg(run.process.pid, signal.SIGUSR2)
        os.kill(rank, signal.SIGCONT)
        run.go_on()
        code, out, err = run.end()
        assert code == 75
        assert err.endswith(f"{UNDER_WAY}\n")
        assert "saved. Run the same command again" in out
        assert [path.name for path in run.run.glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.slow
def test_a_signal_during_the_final_export_lets_the_run_finish(start: Any) -> None:
    with start(EXPORT) as run:
        run.ranks(1)
        run.process.send_signal(signal.SIGTERM)
        run.go_on()
        code, _, err = run.end()
        assert (code, err) == (0, f"SIGTERM{UNDER_WAY}\n")
        assert (run.run / "model" / "config.json").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_launcher_and_ranks_at_once(start: Any) -> None:
    with start(EXPORT, topology={"devices": 2}) as run:
        ranks = run.ranks(2)
        run.process.send_signal(signal.SIGINT)
        assert run.process.stderr.readline() == f"Ctrl-C{UNDER_WAY}\n"
        run.process.send_signal(signal.SIGINT)
        code, _, err = run.end()
        assert (code, err) == (75, "Stopped at once by a second signal: steps after the last checkpoint are lost.\n")
        assert not [pid for pid in ranks if psutil.pid_exists(pid)]


def slurm(rank: int, port: int) -> dict[str, str]:
    """What srun tells one of two tasks."""
    tasks = {"NTASKS": "2", "STEP_NUM_TASKS": "2", "STEP_NUM_NODES": "1", "STEP_TASKS_PER_NODE": "2", "JOB_ID": "7"}
    own = {"PROCID": str(rank), "LOCALID": str(rank), "NODEID": "0", "STEP_NODELIST": "localhost"}
    environ = {f"SLURM_{name}": value for name, value in (tasks | own).items()}
    return environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.slow
def test_a_waiting_srun_task_names_missing_ranks_and_exits_with_75(start: Any) -> None:
    """The real rendezvous, in which the other task never comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with start(MEET, environ=slurm(0, port)) as run:
        run.ranks(1)
        run.go_on()
        line = next(line for line in run.process.stderr if "aiting" in line)
        assert line.startswith(f"Waiting for rank 1 of 2 at 127.0.0.1:{port} (")
        run.process.send_signal(signal.SIGUSR1)
        code, _, err = run.end()
        assert (code, err) == (75, f"Stopped by SIGUSR1 {UNSAVED}")


@pytest.mark.slow
def test_losing_a_peer_during_the_rendezvous_is_not_a_user_error(start: Any) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with start(MEET, environ=slurm(1, store.port)) as run:
        run.ranks(2, first=1)
        run.go_on()
        while not store.check(["fullshard--/member-1"]):
            assert run.process.poll() is None, run.end()
            time.sleep(0.05)
        del store  # rank 0 is gone, and the store with it
        code, _, err = run.end()
        assert code == 1
        assert "Another rank went away (peer-lost)" in err
