"""The host memory that saves are copied to: as large as the state, excluded from forks, allocated only on request."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.checkpoint import background as staging
from fullshard.checkpoint.background import Background, Region, sizes_of
from fullshard.checkpoint.write import Snapshot, Written

CPU = torch.device("cpu")
MIB = 2**20


def state(count: int = 8, size: int = MIB) -> dict[str, torch.Tensor]:
    return {f"model/{number}": torch.full((size // 4,), float(number)) for number in range(count)}


def mappings() -> list[tuple[range, str]]:
    """The memory of this process: addresses, and what the kernel says of each part."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    found = []
    for part in parts[1:]:
        start, end = part.split(" ", 1)[0].split("-")
        found.append((range(int(start, 16), int(end, 16)), part))
    return found


def around(address: int) -> str | None:
    return next((text for span, text in mappings() if address in span), None)


def filled(region: Region, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    region.open(CPU)
    rooms = {}
    for name, tensor in tensors.items():
        room = region.room(name, tensor)
        assert room is not None
        rooms[name] = room.copy_(tensor)
    return rooms


def test_the_memory_is_marked_to_stay_out_of_forks() -> None:
    tensors = state()
    region = Region(sizes_of(tensors), pinned=False)
    rooms = filled(region, tensors)
    assert all(torch.equal(rooms[name], tensors[name]) for name in tensors)
    text = around(rooms["model/3"].data_ptr())
    assert text is not None
    flags = re.search(r"^VmFlags:(.*)$", text, re.MULTILINE)
    assert flags is not None
    assert "dc" in flags[1].split(), text
    region.close()


def test_a_forked_child_does_not_inherit_it() -> None:
    """As a data worker is: what it holds beside its parent does not grow by the copy."""
    tensors = state()
    region = Region(sizes_of(tensors), pinned=False)
    rooms = filled(region, tensors)
    address = rooms["model/0"].data_ptr()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"absent" if around(address) is None else b"there")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"absent"
    os.close(reading)
    os.close(writing)
    assert torch.equal(rooms["model/5"], tensors["model/5"]), "the parent keeps it"
    region.close()


def test_it_is_as_large_as_the_state_and_allocated_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_PIECE", 3 * MIB)  # several pieces, as a large model has them
    tensors = {**state(count=9), "optimizer/odd": torch.zeros(1_000_003, dtype=torch.bfloat16)}
    total = sum(tensor.nbytes for tensor in tensors.values())
    region = Region(sizes_of(tensors), pinned=False)
    assert region.room("model/1", tensors["model/1"]) is None, "nothing is there before it is opened"
    rooms = filled(region, tensors)
    assert total <= region.num_bytes <= 1.05 * total
    places = sorted((room.data_ptr(), room.data_ptr() + room.nbytes) for room in rooms.values())
    assert all(end <= start for (_, end), (start, _) in zip(places, places[1:], strict=False)), "none overlaps"
    spans = [(start, start + length) for start, length in region._pieces]
    assert len(spans) > 2
    first = places[0][0]
    for start, end in places:  # a copy must not cross from one registration into another
        assert any(begin <= start - first and end - first <= stop for begin, stop in spans)
    assert region.room("model/1", torch.zeros(3)) is None, "of another size than was planned for"
    assert region.room("model/new", torch.zeros(3)) is None
    region.close()


def test_memory_that_cannot_be_allocated_is_reported_without_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    background = Background(device=CPU, sizes={"model/huge": 2**62})
    background.reserve()
    assert "Error" in (background.shortage() or "")
    background.close()


def saved(background: Background, tensors: dict[str, torch.Tensor], then: Any) -> dict[str, torch.Tensor]:
    """What a save in the background writes of `tensors`, which change right after it was started."""
    kept: dict[str, torch.Tensor] = {}

    def write(staged: Snapshot) -> Written:
        kept.update(staged.tensors)
        return Written(Path(), 0.0, 0)

    background.reserve()
    assert background.shortage() is None
    background.start(Snapshot(1, tensors, {}, {}, {}, best=False), write)
    then()
    background.settle()
    return kept


def test_quantised_state_is_copied_part_by_part_into_the_same_memory() -> None:
    """torchao says of a state of 8-bit numbers that it is fp32, and hands itself out where a copy is asked for."""
    from torchao.optim.subclass_8bit import OptimState8bit

    live = OptimState8bit.zeros((64, 1024), block_size=256)
    live.copy_(torch.linspace(-1, 1, 64 * 1024).view(64, 1024))
    before = live.dequantize().clone()
    tensors = {"model/w": torch.ones(64, 1024), "optimizer/w/exp_avg": live}
    held = sum(part.nbytes for part in (tensors["model/w"], live.codes, live.scale, live.qmap))
    background = Background(device=CPU, sizes=sizes_of(tensors))
    assert held <= background.num_bytes <= 1.05 * held
    kept = saved(background, tensors, then=lambda: live.copy_(torch.zeros(64, 1024)))
    copy: Any = kept["optimizer/w/exp_avg"]
    assert type(copy) is OptimState8bit
    assert copy.dtype == live.dtype
    assert torch.equal(copy.dequantize(), before), "it is the state of the save, not of the step after"
    del kept, copy
    background.close()


def test_an_unexpected_tensor_is_copied_too() -> None:
    tensors = state(count=2)
    background = Background(device=CPU, sizes=sizes_of({"model/0": tensors["model/0"]}))
    kept = saved(background, tensors, then=lambda: tensors["model/1"].zero_())
    assert torch.equal(kept["model/1"], torch.ones(MIB // 4))
    background.close()
