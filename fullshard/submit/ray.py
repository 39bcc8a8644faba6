"""Ray: `--on ray` writes a driver script, and hands it to the Ray Jobs of a cluster or runs it on this machine.

Must not know what happens in a worker: that is `ray_worker.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from fullshard.errors import SetupError
from fullshard.formatting.plural import counted
from fullshard.submit.engine import Engine, Job, Request, Submitted, call

if TYPE_CHECKING:
    from fullshard.contracts.launcher import Topology

FILE, LOG = "driver.py", "log.txt"
_ADDRESS = re.compile(r"(?:(?:https?|ray)://[^\s/:]+(?::\d+)?(?:/\S*)?|[^\s/:]+:\d+)")
"""Of a dashboard or a Ray client, or HOST:PORT of the cluster itself."""
_SILENT = ("Failed to connect to Ray", "waiting for GCS", "Could not find any running Ray instance")
"""How the `ray` command says that nobody is there."""
INSTALL = "Install it with: pip install 'fullshard[ray]'"
RESTARTS = 3
"""How often Ray restarts the workers if `topology.restarts` does not say."""
SAVE_S = 600
"""How long `ray job stop` waits for a run to save; Ray itself would wait 3 s."""
DRIVER = '''"""Trains {name} on Ray with {workers} workers.

Written by `fullshard submit --on ray`. Where this file is seen, `python {file}` runs it again: the run resumes.
"""

import sys

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from fullshard.submit.ray_driver import fit, train_in_worker


def train():
    return train_in_worker({recipe!r}, folder={folder!r}, run={run!r}, stage={stage!r})


ray.init()  # the cluster of RAY_ADDRESS, or a Ray on this machine
trainer = TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers={workers}, use_gpu={gpu}, resources_per_worker={resources}),
    torch_config=TorchConfig(backend={backend!r}),
    run_config=RunConfig(
        name="ray",
        storage_path={storage!r},
        failure_config=FailureConfig(max_failures={restarts}),
        checkpoint_config=CheckpointConfig(num_to_keep=1),  # the run folder keeps what the recipe asks for
    ),
)
sys.exit(fit(trainer, run={run!r}))
'''


class Ray(Engine):
    """A job of Ray Jobs, or a driver on this machine. --restarts N (default 3) is how often Ray restarts the workers
    after a crash or a lost node; the run resumes."""

    restarts_ranks: ClassVar[bool] = True

    address: str | None = None
    """The cluster: http://HEAD:8265 (its dashboard). By default RAY_API_SERVER_ADDRESS, or this machine."""
    workers: int | None = Field(None, ge=1)
    """Ranks in all, each a worker of Ray Train; by default --nodes times --devices."""
    cpus: int = Field(1, ge=1)
    """CPU cores of each worker."""
    python: str = sys.executable
    """The Python of the driver, on the cluster's head node."""

    def job(self, request: Request) -> Job:
        self._check_address()
        gpu = self._on_gpu(request)
        driver = DRIVER.format(
            name=request.reading.recipe.name,
            file=request.folder / FILE,
            recipe=str(request.recipe_file),
            folder=os.getcwd(),
            stage=request.stage,
            workers=self._workers(request),
            gpu=gpu,
            resources={"CPU": self.cpus, **({"GPU": 1} if gpu else {})},
            backend="cpu:gloo,cuda:nccl" if gpu else "gloo",
            storage=str(request.folder),
            restarts=RESTARTS if (asked := request.reading.recipe.topology.restarts) is None else asked,
            run=str(request.reading.recipe.folder.absolute()),
        )
        return Job({FILE: driver}, self._words(request.folder))

    def submit(self, job: Job, folder: Path) -> Submitted:
        if self._cluster is None:
            return self._start(job, folder)
        try:
            said = call([_tool(), *job.submit[1:]], needs=f"{INSTALL}.", timeout_s=300)
        except SetupError as error:
            if any(words in str(error) for words in _SILENT):
                raise SetupError(
                    f"No Ray cluster answers at {self._cluster}. Start it with ray start --head, or correct the "
                    "address: that of its dashboard, http://HEAD:8265."
                ) from None
            raise
        found, at = re.search(r"raysubmit_\w+", said), f"--address {self._cluster}"
        number = found[0] if found else "JOB"
        return Submitted(
            number,
            {
                "look": f"ray job status {at} {number}",
                "output": f"ray job logs {at} --follow {number}",
                "save, stop": f"ray job stop {at} {number}",
            },
        )

    def worlds(self, topology: Topology) -> list[int]:
        return [self.workers] if self.workers is not None else super().worlds(topology)

    @property
    def _cluster(self) -> str | None:
        return self.address or os.environ.get("RAY_API_SERVER_ADDRESS")

    def _check_address(self) -> None:
        where = "--address " if self.address else "RAY_API_SERVER_ADDRESS="
        if self._cluster and self._cluster != "auto" and not _ADDRESS.fullmatch(self._cluster):
            raise SetupError(
                f"{where}{self._cluster} is not the address of a Ray cluster. Write that of its dashboard: "
                "http://HEAD:8265."
            )

    def _words(self, folder: Path) -> list[str]:
        """The command that submits the driver, or runs it here."""
        run = [self.python, str(folder / FILE)]
        if self._cluster is None:
            return run
        variables = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(SAVE_S)}})
        words = ["ray", "job", "submit", "--address", self._cluster, "--no-wait"]
        return [*words, "--runtime-env-json", variables, "--", *run]

    def _start(self, job: Job, folder: Path) -> Submitted:
        """The driver as a process of its own, which outlives this command."""
        if find_spec("ray") is None:
            raise SetupError(f"Ray is not installed here. {INSTALL}.")
        with (folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                job.submit, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return Submitted(
            str(process.pid),
            {
                "look": f"ps {process.pid}",
                "output": f"tail -F {folder / LOG}",
                "save, stop": f"kill {process.pid}",
            },
        )

    def _workers(self, request: Request) -> int:
        topology = request.reading.recipe.topology
        if self.workers is not None:
            _check_contradiction(self.workers, request)
            return self.workers
        if isinstance(topology.devices, int):
            return topology.nodes * topology.devices
        raise SetupError(
            f"--on ray: topology.devices = {topology.devices} does not say how many workers to ask Ray for. Give "
            "--workers N, the number of GPUs in all."
        )

    def _on_gpu(self, request: Request) -> bool:
        device = request.reading.recipe.topology.device
        if device == "auto" and self._cluster is not None:
            raise SetupError(
                "--on ray: topology.device = auto, and this machine does not know the cluster. Give "
                "topology.device=cuda for a GPU per worker, or topology.device=cpu."
            )
        if device == "auto":
            import torch

            return torch.cuda.is_available()
        return device == "cuda"


def _check_contradiction(workers: int, request: Request) -> None:
    """On the command line --workers must fit --nodes and --devices; over those of the recipe it wins."""
    topology, typed = request.reading.recipe.topology, request.reading.typed
    said = {word.partition("=")[0] for word in (*typed.command, *typed.settings)} if typed else set()
    counts = {"--nodes": topology.nodes, "--devices": topology.devices}
    given = [f"{name} {n}" for name, n in counts.items() if said & {name, f"topology.{name[2:]}"}]
    per_node = topology.devices if isinstance(topology.devices, int) else None
    fits = workers == topology.nodes * per_node if per_node else workers % topology.nodes == 0
    if given and not fits:
        ranks = f"{counted(topology.nodes, 'node')} with {per_node or 'as many'} ranks each"
        raise SetupError(
            f"--workers {workers} and {' '.join(given)} contradict each other: {workers} workers are not {ranks}. Give "
            "--workers alone, or --nodes and --devices."
        )


def _tool() -> str:
    """The `ray` command: on the PATH, or beside this Python."""
    return shutil.which("ray") or str(Path(sys.executable).parent / "ray")


__all__ = ["Ray"]
