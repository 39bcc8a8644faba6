"""What the driver of a Ray job calls: a recipe trained in a worker, and a trainer whose stop requests are heard.

Ray ends a job at once on Ctrl-C. Here the first request lets the run save, and only a mistake of the user is not tried
again. Must not know how a job is submitted.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.errors import EXIT_DONE, EXIT_PREEMPTED, AbsentError, FullshardError
from fullshard.submit.ray_worker import ask_to_stop, forget_end, forget_stop, keep_end, known_end

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer


def train_in_worker(recipe: str, *, folder: str, run: str, stage: str | None = None) -> tuple[int, str]:
    """Trains a recipe in a worker of Ray Train, in the folder where it was submitted. Returns the exit code and what
    there is to say. Raises what a restart may cure, and nothing else."""
    if found := known_end(Path(run)):
        return found  # Ray has started all again, since one rank alone had met it
    import fullshard

    os.chdir(folder)  # Ray gives each worker a folder of its own, and relative paths are the user's
    sys.path.insert(0, folder)
    try:
        result = fullshard.train(recipe, stage=stage)
    except AbsentError:
        raise
    except FullshardError as error:
        code, said = error.exit_code, str(error)
    else:
        stopped = result.stopped == "signal"
        return (EXIT_PREEMPTED, f"Stopped at step {result.step}, and saved.") if stopped else (EXIT_DONE, "")
    if not keep_end(Path(run), code, said):  # the others may wait for this rank: Ray ends them, and starts all again
        raise RuntimeError(f"This rank alone has met what no restart cures: {said}")
    return code, said


def fit(trainer: TorchTrainer, *, run: str) -> int:
    """Runs the trainer and returns the exit code. The first SIGTERM or Ctrl-C lets the run save and stop; a second one
    ends it at once."""
    ended: list[Any] = []

    def work() -> None:
        try:
            ended.append(trainer.fit())
        except BaseException as error:
            ended.append(error)

    forget_stop(Path(run))
    forget_end(Path(run))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _on_signal(run))
    # Not in the main thread: there Ray would take Ctrl-C, and end the workers before they have saved.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
    return _outcome(ended[0], Path(run))


def _on_signal(run: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    ask_to_stop(Path(run))
    print("The step in progress is finished and saved. A second signal stops at once.", file=sys.stderr, flush=True)


def _outcome(ended: Any, run: Path) -> int:
    if isinstance(ended, BaseException):
        found = known_end(run)
        if found is None:
            print(f"The run failed on Ray: {ended}", file=sys.stderr, flush=True)
            return 1
    else:
        found = ended.return_value
    code, said = found
    if said:
        print(said, file=sys.stderr, flush=True)
    return int(code)
