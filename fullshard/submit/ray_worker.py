"""A run inside a worker of Ray Train: its numbers and checkpoints are reported to Ray, and Ray's requests are heard.

Ray runs a training function in a thread, where no signal can be handled, and every call to it is a barrier that may
wait for seconds. So each rank talks to Ray in a thread of its own, in turns that rank 0 leads: training never waits for
Ray, and all ranks make the same calls in the same order. Must not know models, nor how a run saves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import paths
from fullshard.contracts.caller import Caller
from fullshard.errors import SetupError, one_line
from fullshard.log.metrics import scalars
from fullshard.recipe import Recipe

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

TURN_S = 1.0
"""How often Ray is asked, and reported to, at most."""
END_S = 120.0
"""How long the end of a run waits for Ray to take the last report."""
_TOGETHER_S = 10.0
"""A mistake that all ranks meet they meet within this time."""
POINTER = "checkpoint.json"
"""The file that names a checkpoint in a bucket, where it stays."""
_NAMESPACE = "fullshard"


def in_worker() -> bool:
    """Whether this process is a worker of Ray Train."""
    if "ray.train" not in sys.modules:
        return False
    import ray.train

    with contextlib.suppress(RuntimeError, DeprecationWarning, NotImplementedError):  # a driver; Ray Tune; no workers
        ray.train.get_context().get_storage()
        return hasattr(ray.train, "get_preemption_info")  # otherwise the older Ray Train, which cannot be asked
    return False


def ask_to_stop(run: Path) -> None:
    """Asks the run in this folder, on any node of the cluster, to save and stop."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(str(run), b"stop", namespace=_NAMESPACE)


def forget_stop(run: Path) -> bool:
    """Whether the run was asked to stop, or the one that it is a stage of; the request is gone then."""
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get

    for asked in (str(run), str(run.parent)):
        if _internal_kv_get(asked, namespace=_NAMESPACE) is not None:
            _internal_kv_del(asked, namespace=_NAMESPACE)
            return True
    return False


def keep_end(run: Path, code: int, said: str) -> bool:
    """Notes for all workers that the run in this folder has ended in a way that no restart changes. Whether all of them
    have noted an end of their own soon after: those that have not may wait for this one."""
    import ray.train
    from ray.experimental.internal_kv import _internal_kv_list, _internal_kv_put

    context = ray.train.get_context()
    key = f"{_ends_of(run)}{context.get_world_rank():08d}"
    _internal_kv_put(key, json.dumps([code, said]), namespace=_NAMESPACE)
    until = time.monotonic() + _TOGETHER_S
    while time.monotonic() < until:
        if len(_internal_kv_list(_ends_of(run), namespace=_NAMESPACE)) >= context.get_world_size():
            return True
        time.sleep(0.1)
    return False


def known_end(run: Path) -> tuple[int, str] | None:
    """What the first worker noted: the exit code, and what there is to say."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    for key in sorted(_internal_kv_list(_ends_of(run), namespace=_NAMESPACE)):
        if (found := _internal_kv_get(key, namespace=_NAMESPACE)) is not None:
            code, said = json.loads(found)
            return code, said
    return None


def forget_end(run: Path) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(_ends_of(run), del_by_prefix=True, namespace=_NAMESPACE)


def _ends_of(run: Path) -> str:
    return f"{run}: end of rank "


def refuse_lost_folder(recipe: Recipe) -> None:
    """Raises if the run folder would be in the folder that Ray makes for a worker, which other workers cannot see."""
    import ray.train

    working = Path(ray.train.get_context().get_storage().local_working_directory)
    if recipe.folder.absolute().is_relative_to(working):
        raise SetupError(
            f"output = {str(recipe.output)!r} is relative, and Ray runs its workers in {working}, on each node: a "
            "restart would not find the checkpoints. Give a folder that every node sees, such as output=/shared/runs, "
            "or call os.chdir first."
        )


def resume_after_restart(resume: str) -> str:
    """What `resume` means in this worker: a run that Ray restarts goes on, also if it first started over."""
    import ray.train

    return "auto" if resume == "never" and ray.train.get_checkpoint() is not None else resume


@contextlib.contextmanager
def reported(recipe: Recipe, caller: Caller) -> Iterator[Caller]:
    """The caller of a run with Ray beside it. At the end Ray has every number and checkpoint."""
    turns = _Turns(recipe, caller)
    try:
        yield Caller(caller.keep, turns.write, turns.stop_asked, turns.save_asked)
    except BaseException:
        turns.end(wait_s=0)  # a rank may be lost: Ray ends this worker
        raise
    turns.end(wait_s=END_S)


class _Turns:
    """A thread that talks to Ray."""

    def __init__(self, recipe: Recipe, caller: Caller) -> None:
        import ray.train

        self._thread = threading.Thread(target=self._run, name="ray-reports", daemon=True)
        self._recipe, self._caller = recipe, caller
        self._is_main = ray.train.get_context().get_world_rank() == 0
        self._begun = time.strftime("%Y%m%d-%H%M%S")
        """Ray deletes by name: a step that is saved again after a restart needs another one."""
        self._changed = threading.Condition()
        self._numbers: dict[str, Any] = {}
        self._new = False
        """Numbers have come since the last report."""
        self._saved: list[tuple[int, dict[str, Any]]] = []
        """Steps whose checkpoints are not reported yet, with the numbers of each."""
        self._ended = self._stop = self._save = self._preempted = False
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        """One record of the run, on rank 0."""
        with self._changed:
            if record.get("event") == "saved":
                self._saved.append((record["step"], dict(self._numbers)))
                self._save = False
            elif numbers := scalars(record):
                self._numbers |= {"step": record["step"], **numbers}
                self._new = True
        self._caller.write(record)

    def stop_asked(self) -> bool:
        return self._stop or self._caller.stop_asked()

    def save_asked(self) -> bool:
        return self._save or self._caller.save_asked()

    def end(self, *, wait_s: float) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(wait_s)
        if wait_s and self._thread.is_alive():
            logger.warning("Ray has not taken the last report within %g s; the run itself is complete.", wait_s)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            # As with a sink: what is lost is the report, not the run.
            logger.warning(
                "Ray is no longer told about the run, and its requests are no longer heard: %s. metrics.jsonl has "
                "every number.",
                one_line(error),
            )

    def _turn(self) -> bool:
        """One turn, on every rank at once; rank 0 says what it is for. Gives whether another one follows."""
        import ray.train
        import ray.train.collective

        order, report = self._prepare() if self._is_main else (None, None)
        due, more = ray.train.collective.broadcast_from_rank_zero(order)
        if due:
            self._report(report)
        if more and ray.train.get_preemption_info() is not None and not self._preempted:
            self._preempted, self._save = True, self._is_main
            logger.warning("Ray will remove a node: the run saves after this step, and goes on until then.")
        return bool(more)

    def _prepare(self) -> tuple[tuple[bool, bool], tuple[dict[str, Any], Any]]:
        """On rank 0: whether to report, whether another turn follows, and the report."""
        with self._changed:
            if not self._ended:
                self._changed.wait(TURN_S)
            ended = self._ended
        self._stop |= forget_stop(self._recipe.folder.absolute())
        found = self._next_checkpoint(ended)
        report = (found[0] | {"checkpoint": str(found[1])}, self._kept(found[1])) if found else None
        with self._changed:
            due, self._new = self._new or report is not None, self._new and report is not None
            return (due, not ended or self._new or bool(self._saved)), report or (dict(self._numbers), None)

    def _kept(self, path: Path) -> Any:
        """The checkpoint in Ray's storage. Kept before any rank reports: an error here leaves none of them waiting."""
        try:
            return _persist(path, f"{self._begun}/{path.name}")
        except Exception as error:
            logger.warning("Ray's storage does not get %s: %s. It stays in the run folder.", path, one_line(error))
            return None

    def _next_checkpoint(self, ended: bool) -> tuple[dict[str, Any], Path] | None:
        """The oldest checkpoint that is published and not reported. One that is still being written comes later."""
        while self._saved:
            step, numbers = self._saved[0]
            place = self._recipe.checkpoints
            path = (place if files.is_remote(place) else place.absolute()) / files.name_of(step)
            published = paths.exists(path / files.MANIFEST)
            if not published and not ended and len(self._saved) == 1:
                return None
            self._saved.pop(0)
            if published:  # otherwise checkpoint.keep has deleted it already
                return numbers, path
        return None

    def _report(self, report: tuple[dict[str, Any], Any] | None) -> None:
        """Reports to Ray. The numbers and the checkpoint are those of rank 0; the others keep it company."""
        import ray.train

        numbers, checkpoint = report or ({}, None)
        in_place = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(numbers, checkpoint=checkpoint, checkpoint_upload_mode=in_place)


def _persist(path: Path, name: str) -> Any:
    """The checkpoint in Ray's storage: linked if it is the same disk, copied otherwise. One in a bucket stays there,
    and Ray gets a file that says where."""
    import ray.train

    storage = ray.train.get_context().get_storage()
    target = storage.build_checkpoint_path_from_name(name)
    kept = ray.train.Checkpoint(target, filesystem=storage.storage_filesystem)
    if files.is_remote(path):
        storage.storage_filesystem.create_dir(target)
        with storage.storage_filesystem.open_output_stream(f"{target}/{POINTER}") as file:
            file.write(json.dumps({"checkpoint": str(path)}).encode())
    elif storage.storage_filesystem.type_name == "local":
        shutil.copytree(path, target, copy_function=_link)
    else:
        kept = storage.persist_current_checkpoint(ray.train.Checkpoint(str(path)), name)
    return kept


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
