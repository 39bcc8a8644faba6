"""The batch file of a Slurm job: what sbatch is asked for, the environment, the start of the ranks, and the requeue.

It is written to be read and changed by its user, so it says why each line is there. Must not know the command line.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import SetupError
from fullshard.submit.engine import Request

FILE = "job.sbatch"

_OPTIONS = """\
#!/bin/bash
# Trains @NAME@ with fullshard. Written by `fullshard submit`; edit it if you like, and submit it again with
#   sbatch @FILE@
@DIRECTIVES@
# The output of all ranks. After a requeue the job goes on writing to the same file.
#SBATCH @OUTPUT@
#SBATCH --open-mode=append
# @LEAD@ s before the time limit the ranks get USR1: they finish their step, save, and end with exit code 75.
# Slurm may send it 60 s late, so this must be longer than one step + one save + 60 s.
#SBATCH --signal=USR1@@LEAD@
@REQUEUE@
"""

_REQUEUE = """\
# Lets the last lines of this file requeue the job, and Slurm after a preemption or the loss of a node.
#SBATCH --requeue"""

_NO_REQUEUE = """\
# Exit code 75 ends the job. Submit it again to continue.
#SBATCH --no-requeue"""

_SETUP = """\
# When the job is told to end, bash waits for srun: the exit code says whether there is something to continue.
trap : TERM
# srun does not take over --cpus-per-task by itself.
if [ -n "$SLURM_CPUS_PER_TASK" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi
nodes=$SLURM_JOB_NUM_NODES  # may differ from one start to the next; the run resumes on any number
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
echo "fullshard: job $SLURM_JOB_ID on" $hosts "(restarts: ${SLURM_RESTART_COUNT:-0})"
"""

_PROGRESS = """\
# What the run has to show: its checkpoints and the lines of its metrics, also in the folders of stages.
run=@RUN@
idle=@IDLE@  # one line per consecutive start that completed no step
progress() { ls -d "$run"/{,*/}checkpoint-*; cat "$run"/{,*/}metrics.jsonl | wc -l; } 2> /dev/null
before=$(progress)
"""

_ONE_PER_NODE = """\
# One task on each node, which starts the ranks of its node; without SLURM_PROCID it does not take itself for a rank.
# The ranks meet on the first node, at a port that follows from the job's number. A task that ends first does not end
# the others, which may still save.
master="$(head -n 1 <<< "$hosts"):$((10000 + 31 * SLURM_JOB_ID % 20000))"
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 @SRUN@ \\
  bash -c 'unset SLURM_PROCID; exec "$@" --node-rank "$SLURM_NODEID"' agent \\
  @TRAIN@ \\
  --nodes "$nodes" --master "$master"
code=$?
"""

_ONE_PER_RANK = """\
# One task for each rank; they find each other by Slurm's variables. A task that ends first does not end the others,
# which may still save.
srun --nodes="$nodes" --ntasks="$((nodes * @PER_NODE@))" --ntasks-per-node=@PER_NODE@ --distribution=block @SRUN@ \\
  @TRAIN@
code=$?
"""

_END = """\
# 75: stopped, saved, to be continued. Every other code is final: 0 done, 2 a mistake in the recipe or the setup, 3
# stopped by a numerical guard. The state is RUNNING unless somebody cancels the job, or Slurm requeues it already.
if [ "$code" -eq 75 ]; then
  state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)
  echo "fullshard: job $SLURM_JOB_ID was stopped and can continue (state $state)"
  if [ "$(progress)" = "$before" ]; then echo "job $SLURM_JOB_ID" >> "$idle"; else rm -f "$idle"; fi
  if [ -f "$idle" ] && [ "$(wc -l < "$idle")" -ge 3 ]; then
    echo "fullshard: not requeued: 3 starts in a row completed no step. Use a longer --time or a shorter --lead."
    rm "$idle"
  elif [ "$state" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID" && echo "fullshard: requeued"
  fi
fi
"""


@dataclass(frozen=True)
class BatchFile:
    """A job, from the options of sbatch to the exit code."""

    request: Request
    directives: Sequence[str]
    """Options of sbatch, in order."""
    lead: int
    """Seconds between USR1 and the time limit."""
    per_node: int | None = None
    """The tasks on each node, each a rank; None: one task on each node, which starts its ranks."""
    requeue: bool = True
    before: Sequence[str] = ()
    srun: Sequence[str] = ()
    log: str | None = None
    """The file for the output of all ranks, with Slurm's patterns; None: log-%j.txt beside the batch file."""

    def text(self) -> str:
        parts = [_OPTIONS, _environment(os.environ, Path.cwd())]
        if self.before:
            parts.append("\n".join(["# From --before.", *self.before, ""]))
        parts += [
            _SETUP,
            *([_PROGRESS] if self.requeue else []),
            _ONE_PER_NODE if self.per_node is None else _ONE_PER_RANK,
        ]
        parts += [_END + 'exit "$code"\n' if self.requeue else 'exit "$code"\n']
        text = "\n".join(parts)
        for name, value in self._values().items():
            text = text.replace(f"@{name}@", value)
        return text

    def _values(self) -> dict[str, str]:
        """What the placeholders stand for. The last ones hold words of the user and are not searched again."""
        folder = self.request.folder
        output = self.log or f"{folder}/".replace("%", "%%") + "log-%j.txt"
        return {
            "REQUEUE": _REQUEUE if self.requeue else _NO_REQUEUE,
            "LEAD": str(self.lead),
            "PER_NODE": str(self.per_node),
            "NAME": self.request.reading.recipe.name,
            "RUN": shlex.quote(str(folder.parent)),
            "IDLE": shlex.quote(str(folder / "starts-without-a-step")),
            "FILE": shlex.quote(str(folder / FILE)),
            "OUTPUT": _quoted(f"--output={output}"),
            "TRAIN": shlex.join([sys.executable, "-m", "fullshard", *self.request.train()]),
            "SRUN": shlex.join(["--export=ALL", "--kill-on-bad-exit=0", *self.srun]),
            "DIRECTIVES": "\n".join(f"#SBATCH {_quoted(option)}" for option in self.directives),
        }


def _environment(environ: Mapping[str, str], here: Path) -> str:
    return "\n".join([*_environment_lines(environ, here), ""])


def _environment_lines(environ: Mapping[str, str], here: Path) -> Iterator[str]:
    yield "# The folder and the Python environment from which the job was submitted."
    yield f"cd {shlex.quote(str(here))} || exit 2"
    activate = Path(sys.prefix) / "bin" / "activate"
    if activate.is_file():
        yield f"source {shlex.quote(str(activate))}"
    elif conda := environ.get("CONDA_PREFIX"):
        yield f'export CONDA_PREFIX={shlex.quote(conda)} PATH={shlex.quote(f"{conda}/bin")}:"$PATH"'
    if path := environ.get("PYTHONPATH"):
        yield f"export PYTHONPATH={shlex.quote(path)}"


def _quoted(option: str) -> str:
    """An option on a line of a batch file: sbatch splits at spaces, stops at # and knows quotes and backslashes."""
    name, equals, value = option.partition("=")
    if "\n" in option:
        raise SetupError(f"{name}: a batch file has no option of several lines. Give it in one line.")
    if not any(letter in value for letter in " \t'\"\\#"):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'
