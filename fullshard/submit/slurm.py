"""Slurm: `--on slurm` writes a batch file and hands it to sbatch.

The options of sbatch go on as they are (`--partition gpu --gpus-per-node 8`), except those that fullshard sets itself.
Must not know how the batch file reads: that is `batch_file.py`.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fullshard.errors import SetupError
from fullshard.submit.batch_file import FILE, BatchFile
from fullshard.submit.engine import Engine, Job, Request, Submitted, call, ranks_per_node

if TYPE_CHECKING:
    from fullshard.contracts.launcher import Topology

_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+))?(?::(?P<ds>\d+))?|(?P<rest>\d+(?::\d+){0,2}))")
_VALUES = (
    *("account", "array", "begin", "bb", "bbf", "clusters", "comment", "constraint", "container", "core-spec"),
    *("cluster-constraint", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot"),
    *("dependency", "exclude", "export", "export-file", "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus"),
    *("gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "job-name", "licenses"),
    *("mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network"),
    *("nodefile", "nodelist", "partition", "power", "prefer", "priority", "profile", "propagate", "qos"),
    *("reservation", "sockets-per-node", "switches", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind"),
    *("tres-per-task", "uid", "wckey"),
)
_FLAGS = ("contiguous", "exclusive", "hold", "overcommit", "oversubscribe", "reboot", "spread-job", "use-min-nodes")
_SHORT = {
    **{"A": "account", "a": "array", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint"},
    **{"d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "J": "job-name", "L": "licenses"},
    **{"M": "clusters", "n": "ntasks", "N": "nodes", "o": "log-file", "O": "overcommit", "p": "partition", "q": "qos"},
    **{"s": "oversubscribe", "S": "core-spec", "t": "time", "w": "nodelist", "x": "exclude"},
}
_PATTERN = re.compile(r"%\d*[AaJjNnstux]")
"""What Slurm replaces in the name of a log."""
_TASKS = "Use --tasks node (one task on each node, which starts its ranks) or --tasks rank, and --devices N."


def seconds(text: str) -> int | None:
    """A time limit in Slurm's forms (30, 30:00, 4:00:00, 2-12, 2-12:30) in seconds; None for no limit, also 0."""
    if text.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return None
    found = _TIME.fullmatch(text)
    if not found:
        raise SetupError(f"--time {text} is not a Slurm time. Write 4:00:00, 90 (minutes) or 2-12:00:00 (days).")
    if found["days"]:
        days, hours, minutes, rest = (int(found[name] or 0) for name in ("days", "dh", "dm", "ds"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + rest or None
    numbers = [int(number) for number in found["rest"].split(":")]
    if len(numbers) < 3:  # minutes, or minutes:seconds
        return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0) or None
    return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2] or None


class Slurm(Engine):
    """A batch job of Slurm. Every option of sbatch can be given as well."""

    own_options: ClassVar[Mapping[str, bool]] = {**dict.fromkeys(_VALUES, True), **dict.fromkeys(_FLAGS, False)}
    instead: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-gpu"), _TASKS),
        "signal": "Use --lead SECONDS: USR1 comes this long before the time limit.",
        "error": "The output of the job is one file, which --log-file names; standard error is part of it.",
        "wrap": "The job is a batch file. Put lines that run before the training into --before LINE.",
    }

    short: ClassVar[Mapping[str, str]] = _SHORT

    time: str | None = None
    """The time limit of one start: 4:00:00, 90 (minutes), 2-12:00:00 (days) or 0 (none). By default that of the
    partition."""
    lead: int | None = Field(None, ge=1, le=65535)
    """Seconds before the time limit at which the run is told to save; more than a step + a save + 60."""
    tasks: Literal["node", "rank"] = "node"
    """node: one task on each node starts its ranks. rank: Slurm starts every rank; needs --devices N."""
    min_nodes: int | None = Field(None, ge=1)
    """Start with as few nodes as this, if --nodes are not free; needs batch.global."""
    requeue: bool = True
    """Requeue the job when it was stopped and has saved."""
    before: tuple[str, ...] = ()
    """A shell line that runs on the first node before the training, such as 'module load cuda'; can be repeated."""
    log_file: str | None = None
    """The file for the output of the job, with Slurm's patterns: logs/%x-%j.txt. By default log-%j.txt beside the batch
    file."""
    srun: tuple[str, ...] = ()
    """An option of srun, such as --srun=--container-image=IMAGE; can be repeated."""
    sbatch: tuple[str, ...] = ()
    """An option of sbatch that is not known here, such as --sbatch=--x11; can be repeated."""
    passed: tuple[str, ...] = ()
    """Options of sbatch that go on as they are."""

    def worlds(self, topology: Topology) -> list[int]:
        per_node = ranks_per_node(topology) or self._gpus_per_node()
        least = min(self.min_nodes or topology.nodes, topology.nodes)
        return [nodes * per_node for nodes in range(least, topology.nodes + 1)] if per_node else []

    def _gpus_per_node(self) -> int | None:
        """What Slurm is asked for, in the forms 8, h100:8 and gpu:8."""
        found = [re.fullmatch(r"--(?:gpus-per-node=|gres=gpu:)(?:\w+:)?(\d+)", option) for option in self.passed]
        return next((int(match[1]) for match in found if match), None)

    def job(self, request: Request) -> Job:
        _check_output(str(request.reading.recipe.output))
        limit = None if self.time is None else seconds(self.time)
        lead = self.lead or (300 if limit is None else min(300, limit // 2))
        if limit is not None and lead >= limit:
            raise SetupError(
                f"--lead {lead} is not shorter than --time {self.time}: the job would save and stop at once."
            )
        text = BatchFile(
            request,
            self._directives(request),
            lead=lead,
            per_node=self._per_node(request),
            requeue=self.requeue,
            before=self.before,
            srun=self.srun,
            log=self.log_file,
        ).text()
        return Job({FILE: text}, ("sbatch", str(request.folder / FILE)))

    def submit(self, job: Job, folder: Path) -> Submitted:
        words = ("sbatch", "--parsable", *job.submit[1:])
        number = call(words, needs="Submit from a machine of the cluster, such as its login node.").split(";")[0]
        stop = f"scontrol update jobid={number} requeue=0 && scancel --signal=USR1 {number}"
        return Submitted(
            number,
            {
                "look": f"squeue --jobs {number}",
                "output": f"tail -F {(self.log_file or str(folder / 'log-%j.txt')).replace('%j', number)}",
                "save, stop": stop if self.requeue else f"scancel --signal=USR1 {number}",
                "cancel": f"scancel {number}",
            },
        )

    def _directives(self, request: Request) -> list[str]:
        """The options of sbatch that say where the job runs."""
        recipe, given = request.reading.recipe, [*self.passed, *map(_option, self.sbatch)]
        nodes = recipe.topology.nodes
        _check_array(given, run=recipe.name)
        if self.min_nodes is not None:
            self._check_min_nodes(request, self.min_nodes)
        found = [] if any(option.startswith("--job-name") for option in given) else [f"--job-name={recipe.name}"]
        found.append(f"--nodes={nodes}" if self.min_nodes in (None, nodes) else f"--nodes={self.min_nodes}-{nodes}")
        if per_node := self._per_node(request):
            # For one task on each node it is left out: Slurm would no longer let the number of nodes change.
            found.append(f"--ntasks-per-node={per_node}")
        return [*found, *([f"--time={self.time}"] if self.time else []), *given]

    def _check_min_nodes(self, request: Request, least: int) -> None:
        recipe = request.reading.recipe
        if least > recipe.topology.nodes:
            raise SetupError(f"--min-nodes {least} is more than --nodes {recipe.topology.nodes}. Swap them.")
        if least < recipe.topology.nodes and recipe.batch.global_size is None:
            raise SetupError(
                f"--min-nodes {least} lets the number of ranks change, and with it the samples per step. Set "
                "batch.global: the step then stays the same on any number of nodes."
            )

    def _per_node(self, request: Request) -> int | None:
        """The ranks that Slurm starts on each node; None if our task on each node starts them."""
        devices = request.reading.recipe.topology.devices
        if self.tasks == "node":
            return None
        if restarts := request.reading.recipe.topology.restarts:
            raise SetupError(
                f"topology.restarts = {restarts} needs --tasks node: with --tasks rank Slurm starts the ranks, and "
                "does not restart them. Leave out --tasks rank, or set topology.restarts=0."
            )
        if isinstance(devices, int):
            return devices
        raise SetupError(
            f"--tasks rank: Slurm must know how many ranks to start on each node, and topology.devices = {devices}. "
            "Give --devices N, the number of GPUs of one node."
        )


def _check_output(output: str) -> None:
    """--output is an option of sbatch as well, and means the log there."""
    if found := _PATTERN.search(output):
        raise SetupError(
            f"--output {output}: here it is the folder that holds run folders, and {found[0]} has no meaning in it. "
            f"The log of the job is named by --log-file {output}."
        )


def _check_array(given: Sequence[str], *, run: str) -> None:
    """Tasks of an array train the same run: in turn they continue it, at once they would overwrite each other."""
    found = [match for option in given if (match := re.match(r"(?:--array|-a)[= ]?(.+)", option))]
    if found and not (tasks := found[-1][1].strip().strip("'\"")).isdigit() and not tasks.endswith("%1"):
        raise SetupError(
            f"--array {tasks} starts tasks that would train in the run folder of {run} at the same time. To let them "
            f"continue one run in turn, write --array {tasks.partition('%')[0]}%1. For several runs, submit each with "
            f"a name of its own: fullshard submit RECIPE --on slurm name={run}-1."
        )


def _option(text: str) -> str:
    """An option of sbatch, also given as the line of a batch file, with its quotes."""
    option = text.strip().removeprefix("#SBATCH").strip()
    with contextlib.suppress(ValueError):
        option = words[0] if "#SBATCH" in text and len(words := shlex.split(option)) == 1 else option
    if not option.startswith("-"):
        raise SetupError(f"--sbatch {text!r} is not an option. Write it as on the command line: --sbatch=--x11.")
    return option


__all__ = ["Slurm"]
