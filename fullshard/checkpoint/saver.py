"""Saves one run: checkpoints now or in the background, and the final export; and reads a checkpoint back.

Called by the loop on every rank. Must not know losses, data or when it is called.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.card.facts import Exported
from fullshard.card.write import write_card
from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity, load, paths
from fullshard.checkpoint.background import Background, shortage, sizes_of
from fullshard.checkpoint.tensors import Tensors, all_tensors, materialise_state, squares
from fullshard.checkpoint.write import Snapshot, Target, Written, write
from fullshard.contracts.model import Family
from fullshard.contracts.progress import Progress
from fullshard.contracts.world import World
from fullshard.dist import reduce, values
from fullshard.dist.agreement import all_or_fail
from fullshard.dist.average import Average
from fullshard.dist.shard import reshard
from fullshard.errors import CheckpointError, SetupError
from fullshard.faults.patience import tell_wait
from fullshard.faults.segments import begin_with_state
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
    newest_checkpoint: Path | None = field(default=None, init=False)
    """The newest checkpoint: the one that the run resumed from, or its own last one."""

    def save_in_background(self, wanted: bool | None) -> None:
        """Lets later saves run in the background if that is wanted and host memory allows; the same on all ranks."""
        if wanted is False or (wanted is None and self.world.device.type != "cuda"):
            return
        tensors = self._future_tensors()
        self.background = Background(device=self.world.device, sizes=sizes_of(tensors))
        if short := shortage(self.background.num_bytes, self.world):
            if wanted:
                self.close()
                raise SetupError(
                    f"checkpoint.asynchronous = true: {short}. Set it to false, use more nodes, or free memory."
                )
            self._stop_background(short)
            return
        _ = self._processor_files, self._frozen  # computed once, before the first step
        if self.target.sharded is not None:
            self.target.sharded.agree(tensors, "A save cannot be planned", group=self.group)

    def _future_tensors(self) -> Tensors:
        """The tensors of a save. An optimizer that has no state yet creates it for this."""
        fresh = not self.optimizer.state
        if fresh:
            materialise_state(self.optimizer)
            if self.average:
                self.average.materialise()
        tensors = all_tensors(self.model, self.optimizer, left_out=self.left_out)
        if fresh:
            begin_with_state(self.optimizer)
        return tensors

    def save(self, progress: Progress, best: bool, *, now: bool = False) -> None:
        """Saves `checkpoint-STEP` after the previous save is done; in the background if possible, unless `now`."""
        self.settle(for_next=True)
        snapshot = self._snapshot(progress, best)
        if self.background is None or now or not self._memory_reserved(self.background):
            self._announce(write(snapshot, self.target, group=self.group))
        else:
            self.background.start(snapshot, lambda staged: write(staged, self.target, group=self.group))

    def reserve_memory(self) -> None:
        """Takes the host memory for a save that is near, if there is enough; on all ranks in the same step."""
        if self.background is None or self.background.reserved:
            return
        if short := shortage(self.background.num_bytes, self.world, group=self.group):
            self._stop_background(short)
        else:
            self.background.reserve()

    def _memory_reserved(self, background: Background) -> bool:
        """Whether all ranks have memory to copy to. An unexpected save, as on a signal, is written directly."""
        if self._agreed or not background.reserved:
            return self._agreed
        for rank, problem in enumerate(reduce.gather_objects(background.shortage(), group=self.group)):
            if problem:
                needed = f"{problem}; {size(background.num_bytes)} are needed"
                self._stop_background(f"Rank {rank} has no host memory to save in the background ({needed})")
                return False
        self._agreed = True
        return True

    def _stop_background(self, reason: str) -> None:
        assert self.background is not None
        self.background.close()
        self.background = None
        self.console.warn(f"{reason}: training waits for every save.")

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
            self._announce(written)

    def settle(self, *, for_next: bool = False) -> None:
        """Waits for the save in the background, if any, and raises its error. `for_next`: another save waits for it."""
        begun = time.monotonic()
        if self.background is not None and (written := self.background.settle()):
            tell_wait(time.monotonic() - begun, written.lost_s, for_next=for_next, say=self.console.note)
            self._announce(written)

    def newest(self) -> str:
        """A sentence about what to resume from; waits for the save under way."""
        with contextlib.suppress(CheckpointError):  # after a failed save the previous one remains
            self.settle()
        if self.newest_checkpoint is None:
            return "No checkpoint has been saved yet."
        return f"The last checkpoint before it is {self.newest_checkpoint}."

    def close(self) -> None:
        """Ends the background thread; a save that is still under way is finished first."""
        if self.background is not None:
            if self.background.busy:
                self.console.note("Waiting for the save that is under way.")
            self.background.close()

    def restore_newest(self) -> Progress:
        """Goes back to the newest checkpoint, whose every byte is verified again; returns how far it is."""
        newest, world = self.newest_checkpoint, self.world
        assert newest is not None
        with all_or_fail(f"The run cannot go back to {newest}"):
            if found := integrity.problems(newest, rank=world.rank, world=world.size):
                raise CheckpointError(found[0])
        self.restore(newest)
        return Progress(**files.read_state(newest)["progress"])

    def restore(self, checkpoint: Path) -> None:
        """Loads weights, optimizer state and loss scale."""
        state = files.read_state(checkpoint)
        saved, now = state.get("frozen") or {}, self._frozen
        if changed := [name for name, found in saved.items() if now.get(name, found) != found]:
            raise CheckpointError(
                f"{checkpoint} was trained on other frozen weights: {len(changed)} of {len(now)} differ from those "
                f"that the model's folder holds now, first {changed[0]}. Resume with the base model it was trained on."
            )
        load.load(checkpoint, model=self.model, optimizer=self.optimizer, average=self.average, left_out=self.left_out)
        if self.scaler and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        self.newest_checkpoint = checkpoint

    def export(self, progress: Progress) -> str:
        """Writes `model/` and says whose weights it holds; for the best ones they are loaded back first."""
        best = progress.best_step if self.export_best else None
        if best is not None and best != progress.step:
            average = self.average.tensors() if self.average else {}
            path = self.target.run / files.name_of(best)
            load.load_weights(path, model=self.model, left_out=self.left_out, average=average)
        weights = "averaged weights" if self.average else "weights"
        step = f"step {progress.step}" if best is None else f"step {best}, the best"
        with self.average.in_place() if self.average else contextlib.nullcontext():
            return f"{self._write_model(progress, best)} (the {weights} of {step})"

    def _snapshot(self, progress: Progress, best: bool) -> Snapshot:
        tensors = all_tensors(self.model, self.optimizer, left_out=self.left_out)
        shares = {kind: reduce.HostCopy(share.reshape(1)) for kind, share in squares(tensors).items()}
        facts = {
            "progress": progress.as_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "world_size": self.world.size,
            "frozen": self._frozen,
        }
        # A copy: progress changes while this is written.
        facts = copy.deepcopy(facts) | self.facts
        return Snapshot(progress.step, tensors, shares, facts, self._processor_files, best)

    @cached_property
    def _processor_files(self) -> dict[str, bytes]:
        """The tokenizer's files, on rank 0, so that a checkpoint can be exported anywhere; they never change."""
        found: dict[str, bytes] = {}
        with all_or_fail("The tokenizer cannot be saved", group=self.group):
            if self.world.is_main and hasattr(self.processor, "save_pretrained"):
                with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
                    self.processor.save_pretrained(folder)
                    for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
                        found[str(path.relative_to(folder))] = path.read_bytes()
        return found

    @cached_property
    def _frozen(self) -> dict[str, int]:
        """Checksums of the parameters that are not saved."""
        parameters = dict(self.model.named_parameters())
        return values.fingerprints({name: parameters[name] for name in sorted(self.left_out)})

    def _announce(self, written: Written) -> None:
        self.newest_checkpoint = written.path
        if self.world.is_main:
            paths.send_texts(self.folder, self.target.run, warn=self.console.warn)
        self.console.saved(written.path, seconds=written.seconds, size_bytes=written.size_bytes)

    def _write_model(self, progress: Progress, best: int | None) -> Path:
        """Whole tensors, one at a time, from all ranks to rank 0, which writes them as `model/` with a card."""
        reshard(self.model)
        target, tensors = self.folder / "model", self._whole_tensors()
        with all_or_fail(f"{target} cannot be written"):
            try:
                if self.world.is_main:
                    hidden = files.begin_export(self.folder)
                    self.family.export(self.model, tensors, hidden, processor=self.processor)
                    if kept := write_card(hidden, self._exported(progress, best), before=target):
                        self.console.warn(kept)
            finally:  # every rank gathers to the end, also when rank 0 fails
                deque(tensors, maxlen=0)
            if self.world.is_main:
                files.replace(hidden, target)
                if files.is_remote(self.target.run):
                    paths.upload_model(target, self.target.run)
        return self.target.run / "model"

    def _exported(self, progress: Progress, best: int | None) -> Exported:
        form = "adapter" if self.family.adapters(self.model) else "whole"
        state = {"progress": progress.as_dict(), "world_size": self.world.size, **self.facts}
        step = progress.step if best is None else best
        return Exported(self.family, self.model, state, step, form, self.average is not None, self.folder)

    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            if self.family.exports(self.model, name):
                assert isinstance(parameter, DTensor)
                tensor = values.whole(parameter)
                yield name, tensor.cpu() if self.world.is_main else tensor
