"""Saves one run: checkpoints now or in the background, and the final export; and reads a checkpoint back.

Called by the loop on every rank alike. Must not know losses, data or when it is called.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import load, remote
from fullshard.checkpoint.background import Background
from fullshard.checkpoint.host_capacity import shortage
from fullshard.checkpoint.tensors import Tensors, all_tensors, squares
from fullshard.checkpoint.write import Snapshot, Target, Written, write
from fullshard.contracts.model import Family
from fullshard.contracts.progress import Progress
from fullshard.contracts.world import World
from fullshard.dist import reduce, values
from fullshard.dist.all_or_fail import together
from fullshard.dist.average import Average
from fullshard.dist.shard import reshard
from fullshard.errors import CheckpointError
from fullshard.formatting.readable import size
from fullshard.log.console import Console


@dataclass
class Saver:
    """What is saved, and where."""

    folder: Path
    target: Target
    export_best: bool
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    facts: dict[str, Any]
    """What does not change during the run: its identity and its recipe."""
    left_out: Collection[str]
    """Frozen parameters that the model's own folder holds: not saved, only their checksums."""
    family: Family
    processor: Any
    world: World
    console: Console
    group: Any
    """All ranks over gloo, separate from training's group, with its own timeout."""
    average: Average | None = None
    """Averaged weights, exported instead of the trained ones."""
    background: Background | None = None
    _agreed: bool = field(default=False, init=False)
    """All ranks have the host memory for a save in the background."""
    _newest: Path | None = field(default=None, init=False)
    """The newest checkpoint: the one that the run resumed from, or its own last one."""
    _processor_files: dict[str, bytes] | None = field(default=None, init=False)
    _frozen: dict[str, int] | None = field(default=None, init=False)

    def prepare(self, tensors: Tensors) -> None:
        """Does once, before the first step, what every save needs; `tensors` are like those that will be saved."""
        self._files_of_processor()
        self._frozen_checksums()
        if self.target.sharded is not None:
            self.target.sharded.agree(tensors, "A save cannot be planned", group=self.group)

    def save(self, progress: Progress, best: bool, *, now: bool = False) -> None:
        """Publishes `checkpoint-STEP`, moves the pointers, removes what retention does not keep. In the background,
        if there is one, unless it is wanted `now`; the save before that is settled first."""
        self.settle()
        snapshot = self._snapshot(progress, best)
        if now or not self._has_room():
            self._say(write(snapshot, self.target, group=self.group))
        else:
            assert self.background is not None
            self.background.start(snapshot, lambda staged: write(staged, self.target, group=self.group))

    def approach(self) -> None:
        """A save is near: takes the host memory for its copy, if there is enough. Called on all ranks in the same
        step."""
        if self.background is None or self.background.reserved:
            return
        if short := shortage(self.background.num_bytes, self.world, group=self.group):
            self._wait_for_saves(short)
        else:
            self.background.reserve()

    def _has_room(self) -> bool:
        """Whether all ranks have memory to copy to. An unexpected save, as on a signal, is written directly."""
        if self.background is None or not self.background.reserved:
            return False
        if not self._agreed:
            found = reduce.gather_objects(self.background.shortage(), group=self.group)
            problems = {rank: problem for rank, problem in enumerate(found) if problem}
            if problems:
                rank, problem = next(iter(problems.items()))
                self._wait_for_saves(
                    f"Rank {rank} has no host memory to save in the background ({problem}; "
                    f"{size(self.background.num_bytes)} are needed)"
                )
                return False
            self._agreed = True
        return True

    def _wait_for_saves(self, reason: str) -> None:
        assert self.background is not None
        self.console.warn(f"{reason}: training waits for every save.")
        self.background.close()
        self.background = None

    def finish_copy(self) -> None:
        """Before an update: waits, on the device, until the save under way has copied the tensors that change."""
        if self.background is not None:
            self.background.finish_copy()

    @property
    def failed(self) -> bool:
        """Whether a save in the background failed on this rank; `settle` raises the error."""
        return self.background is not None and self.background.failed

    def report(self) -> None:
        """Reports a save in the background that has ended; does not wait."""
        if self.background is not None and (written := self.background.finished()):
            self._say(written)

    def settle(self) -> None:
        """Waits for the save in the background, if any, and raises its error."""
        if self.background is None or not self.background.busy:
            return
        begun = time.monotonic()
        written = self.background.settle()
        if written is not None:
            self._say(written)
        if (waited := time.monotonic() - begun) > 1:
            self.console.note(f"Training waited {waited:.1f} s for the save before: save less often.")

    def newest(self) -> str:
        """What to resume from, in a sentence; waits for the save under way."""
        with contextlib.suppress(CheckpointError):  # after a failed save the one before remains
            self.settle()
        if self._newest is None:
            return "No checkpoint has been saved yet."
        return f"The last checkpoint is from before: {self._newest}."

    def close(self) -> None:
        """Ends the background thread; a save that is still under way is finished first."""
        if self.background is not None:
            if self.background.busy:
                self.console.note("Waiting for the save that is under way.")
            self.background.close()

    def restore(self, checkpoint: Path) -> None:
        """Loads weights, optimizer state and loss scale."""
        state = files.read_state(checkpoint)
        self._check_frozen(checkpoint, state.get("frozen"))
        load.load(checkpoint, model=self.model, optimizer=self.optimizer, average=self.average, left_out=self.left_out)
        if self.scaler and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        self._newest = checkpoint

    def export(self, progress: Progress) -> str:
        """Writes `model/` and says whose weights it holds; for the best ones they are loaded back first."""
        best = progress.best_step if self.export_best else None
        if best is not None and best != progress.step:
            average = self.average.tensors() if self.average else {}
            path = self.target.run / files.name_of(best)
            load.load_weights(path, model=self.model, left_out=self.left_out, average=average)
        weights = "averaged weights" if self.average else "weights"
        which = (
            f"the {weights} of step {best}, the best" if best is not None else f"the {weights} of step {progress.step}"
        )
        with self.average.in_place() if self.average else contextlib.nullcontext():
            return f"{self._write_model()} ({which})"

    def _snapshot(self, progress: Progress, best: bool) -> Snapshot:
        tensors = all_tensors(self.model, self.optimizer, left_out=self.left_out)
        shares = squares(tensors)
        stacked = torch.stack(list(shares.values())) if shares else torch.zeros(0)
        facts = {
            "progress": progress.as_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "world_size": self.world.size,
            "frozen": self._frozen_checksums(),
        }
        # A copy: progress changes while this is written.
        facts = copy.deepcopy(facts) | self.facts
        return Snapshot(
            progress.step, tensors, list(shares), reduce.HostCopy(stacked), facts, self._files_of_processor(), best
        )

    def _files_of_processor(self) -> dict[str, bytes]:
        """The tokenizer's files, so that a checkpoint can be exported anywhere; they never change."""
        if self._processor_files is None:
            found = self._processor_files = {}

            def read() -> None:
                if self.world.is_main and hasattr(self.processor, "save_pretrained"):
                    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
                        self.processor.save_pretrained(folder)
                        for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
                            found[str(path.relative_to(folder))] = path.read_bytes()

            together(read, "The tokenizer cannot be saved", group=self.group)
        return self._processor_files

    def _frozen_checksums(self) -> dict[str, int]:
        if self._frozen is None:
            parameters = dict(self.model.named_parameters())
            self._frozen = values.fingerprints({name: parameters[name] for name in sorted(self.left_out)})
        return self._frozen

    def _check_frozen(self, checkpoint: Path, saved: dict[str, int] | None) -> None:
        now = self._frozen_checksums()
        changed = [name for name, found in (saved or {}).items() if now.get(name, found) != found]
        if changed:
            raise CheckpointError(
                f"{checkpoint} was trained on other frozen weights: {len(changed)} of {len(now)} differ from those "
                f"that the model's folder holds now, first {changed[0]}. Resume with the base model it was trained on."
            )

    def _say(self, written: Written) -> None:
        self._newest = written.path
        if self.world.is_main:
            remote.send_texts(self.folder, self.target.run, warn=self.console.warn)
        self.console.saved(written.path, seconds=written.seconds, size_bytes=written.size_bytes)

    def _write_model(self) -> Path:
        """Whole tensors, one at a time, from all ranks to rank 0, which writes them as `model/`."""
        reshard(self.model)
        target = self.folder / "model"
        tensors = self._whole_tensors()

        def put() -> None:
            hidden = files.begin_export(self.folder)
            try:
                self.family.export(self.model, tensors, hidden, processor=self.processor)
            finally:  # the other ranks are still gathering: finish that before an error is raised
                _exhaust(tensors)
            files.replace(hidden, target)
            if files.is_remote(self.target.run):
                remote.upload_model(target, self.target.run)

        together(put if self.world.is_main else lambda: _exhaust(tensors), f"{target} cannot be written")
        return self.target.run / "model"

    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            if self.family.exports(self.model, name):
                assert isinstance(parameter, DTensor)
                tensor = values.whole(parameter)
                yield name, tensor.cpu() if self.world.is_main else tensor


def _exhaust(tensors: Iterator[Any]) -> None:
    for _ in tensors:
        pass
