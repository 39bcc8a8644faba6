"""`fullshard.save` and `fullshard.load`: exact continuation, other numbers of ranks, and every mistake in words."""

from __future__ import annotations

import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fullshard
from fullshard import CheckpointError, SetupError
from fullshard.cli import app
from fullshard.dist import world as worlds
from fullshard.own_loop import extras
from tests.near import assert_near
from tests.own_loop.loops import batch, build, loss_of, optimizer_of, plain, sharded, weights
from tests.ranks import RankPool


@pytest.fixture
def alone() -> Any:
    """A single rank in this process, without a launcher."""
    yield
    worlds.leave(at_exit=True)


@pytest.mark.parametrize("kind", ["tied", "frozen"])
def test_a_saved_run_continues_bitwise(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    straight = ranks.run(sharded, kind, world=2)[0]
    first = ranks.run(sharded, kind, world=2, folder=tmp_path, save_after=3)[0]
    losses, trained = ranks.run(sharded, kind, world=2, folder=tmp_path)[0]
    assert first[0] + losses == straight[0]
    assert all(torch.equal(weight, straight[1][name]) for name, weight in trained.items())
    done = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert done.exit_code == 0
    assert "checkpoint-3 is intact" in done.output


def test_it_continues_on_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    expected = plain("frozen")
    losses = []
    for world, stop in ((1, 2), (2, 4), (4, None)):
        losses += ranks.run(sharded, "frozen", world=world, folder=tmp_path, save_after=stop)[0][0]
    assert_near(losses, expected[0], 1e-6)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    loss_of("frozen", model, batch("frozen", number)).backward()
    optimizer.step()
    optimizer.zero_grad()


def opened(kind: str = "frozen", *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fullshard.shard(build(kind, seed=seed), device="cpu")
    return model, optimizer_of(model)


def test_what_comes_back(alone: None, tmp_path: Path) -> None:
    """Values as they were given, objects in place, settings of the optimizer, and parameters without a state."""
    model, _ = opened()
    # The last block is not in the optimizer; the head never has a gradient.
    used = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("blocks.2")]
    optimizer = torch.optim.SGD(used, lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    model.head.requires_grad_(False)
    step(model, optimizer)
    schedule.step()
    given = {"epoch": 2, "history": [1.5, math.inf], "name": "a", "pair": (1, None), "seen": {3: "x"}}
    random = torch.get_rng_state()
    path = fullshard.save(tmp_path, model=model, optimizer=optimizer, schedule=schedule, random=random, **given)
    assert path == tmp_path / "checkpoint-0"

    other, _ = opened(seed=1)
    again = torch.optim.SGD([dict(other.named_parameters())[name] for name in names(model, used)], lr=7.0, momentum=0.9)
    later = torch.optim.lr_scheduler.MultiStepLR(again, [1, 3])
    found = fullshard.load(tmp_path, model=other, optimizer=again, schedule=later)
    assert torch.equal(found.pop("random"), random)
    assert found == given | {"step": 0}
    assert again.param_groups[0]["lr"] == 0.05
    assert later.milestones == Counter({1: 1, 3: 1})
    states = [{n: s for n, s in ((names(m, [p])[0], v) for p, v in o.state.items()) if s} for m, o in
              ((model, optimizer), (other, again))]  # fmt: skip
    assert states[0].keys() == states[1].keys()
    assert "head.weight" not in states[0]
    for name, state in states[0].items():
        assert torch.equal(state["momentum_buffer"].to_local(), states[1][name]["momentum_buffer"].to_local())
    assert all(torch.equal(w, weights(other)[name]) for name, w in weights(model).items())


def names(model: nn.Module, parameters: list[Any]) -> list[str]:
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    return [by_parameter[parameter] for parameter in parameters]


def test_a_plain_model_gets_the_weights(alone: None, tmp_path: Path) -> None:
    model, optimizer = opened()
    step(model, optimizer)
    fullshard.save(tmp_path, model=model, optimizer=optimizer, step=12)
    worlds.leave(at_exit=True)
    bare = build("frozen", seed=1)
    assert fullshard.load(tmp_path, model=bare) == {"step": 12}
    assert not torch.distributed.is_initialized()
    with torch.no_grad():
        assert torch.equal(bare(batch("frozen", 0)), model(batch("frozen", 0)))
    assert bare.blocks[0].gain.shape == ()
    with pytest.raises(SetupError, match=r"fullshard\.save: the model is not sharded"):
        fullshard.save(tmp_path, model=bare)
    with pytest.raises(SetupError, match="The ranks are not connected"):
        fullshard.save(tmp_path, model=model)


def test_best_last_and_keep(alone: None, tmp_path: Path) -> None:
    model, _ = opened()
    for number in range(5):
        fullshard.save(tmp_path, model=model, best=number == 1, keep=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-3",
        "checkpoint-4",
    ]
    assert fullshard.load(tmp_path / "best", model=model) == {"step": 1}
    assert fullshard.load(tmp_path, model=model) == {"step": 4}
    assert fullshard.load(str(tmp_path / "checkpoint-3"), model=model) == {"step": 3}


def damage(checkpoint: Path) -> Path:
    file = next(checkpoint.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


def test_a_damaged_checkpoint(alone: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one before it is loaded, with a warning; one that is named is refused."""
    model, optimizer = opened()
    for _ in range(2):
        fullshard.save(tmp_path, model=model, optimizer=optimizer)
    file = damage(tmp_path / "checkpoint-1")
    with caplog.at_level(logging.WARNING):
        assert fullshard.load(tmp_path, model=model, optimizer=optimizer) == {"step": 0}
    assert f"{file} was changed" in caplog.text
    with pytest.raises(CheckpointError, match=r"checkpoint-1 is damaged: .* was changed.*Load another one"):
        fullshard.load(tmp_path / "last", model=model)
    damage(tmp_path / "checkpoint-0")
    with pytest.raises(CheckpointError, match="checkpoint-1 is damaged.*checkpoint-0 is damaged"):
        fullshard.load(tmp_path, model=model)


def test_what_does_not_fit(alone: None, tmp_path: Path) -> None:
    model, optimizer = opened()
    fullshard.save(tmp_path / "a", model=model, optimizer=optimizer)
    other = build("frozen")
    other.extra = nn.Linear(2, 2)
    del other.blocks[2]
    other.head = nn.Linear(12, 5)
    said = (
        "does not fit the model. 2 tensors missing from the checkpoint: extra.bias, extra.weight; 3 tensors "
        "not in the model: blocks.2.gain, blocks.2.mix.bias, blocks.2.mix.weight; 2 tensors "
        "of another shape: head.weight (saved [3, 12], the model has [5, 12]), head.bias"
    )
    for candidate in (other, fullshard.shard(other, device="cpu")):
        with pytest.raises(CheckpointError) as caught:
            fullshard.load(tmp_path / "a", model=candidate)
        assert said in str(caught.value)
    one_group = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(CheckpointError, match=r"2 parameter groups.*\(4 \+ 7 parameters\), this AdamW has 1 \(11\)"):
        fullshard.load(tmp_path / "a", model=model, optimizer=one_group)
    with pytest.raises(CheckpointError, match="saved without schedule. Saved were: no extra values"):
        fullshard.load(tmp_path / "a", model=model, schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(SetupError, match="epoch has no load_state_dict. Plain values come back"):
        fullshard.load(tmp_path / "a", model=model, epoch=3)
    fullshard.save(tmp_path / "b", model=model)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        fullshard.load(tmp_path / "b", model=model, optimizer=optimizer)
    stranger = torch.optim.SGD(build("mlp").parameters())
    with pytest.raises(SetupError, match=r"The parameters of this SGD are not the model's: it was built before"):
        fullshard.save(tmp_path / "b", model=model, optimizer=stranger)
    with pytest.raises(CheckpointError, match="nothing has no checkpoint"):
        fullshard.load(tmp_path / "nothing", model=model)
    assert fullshard.load(tmp_path / "nothing", model=model, missing_ok=True) == {}


def test_values_that_a_checkpoint_cannot_hold(alone: None, tmp_path: Path) -> None:
    model, _ = opened()
    for extra, said in (
        ({"log": {"now": object()}}, "log.now is an object, which a checkpoint cannot hold. Allowed: numbers"),
        ({"big": torch.zeros(2**19)}, "big is a tensor of 524,288 values"),
        ({"teacher": nn.Linear(1, 1)}, "a Linear among the extra values"),
        ({"step": -1}, "step = -1"),
        ({"step": 1.5}, "step = 1.5; it must be a whole number"),
        ({"step": "x"}, "step = 'x'; it must be a whole number"),
        ({"keep": 0}, "keep = 0; it must be at least 1"),
        ({"keep": "all"}, "keep = 'all'; it must be a whole number"),
        ({"optimizer": "adam"}, "optimizer = 'adam'; it must be a torch.optim.Optimizer"),
    ):
        with pytest.raises(SetupError, match=said):
            fullshard.save(tmp_path, model=model, **extra)
    assert not list(tmp_path.iterdir())


def test_extra_values_are_the_same_after_reading() -> None:
    value: Any = {
        "a": [1, (2.5, "x")],
        3: {"$": None},
        "t": torch.tensor([[1.5]], dtype=torch.bfloat16),
        "e": torch.empty(0, 2),
    }
    import json

    found = extras.decode(json.loads(json.dumps(extras.encode(value, "value"))))
    assert torch.equal(found.pop("t"), value.pop("t"))
    assert found.pop("e").shape == value.pop("e").shape
    assert found == value
    import numpy

    assert extras.decode(extras.encode(numpy.float64(0.5), "n")) == 0.5


@pytest.mark.parametrize("command", ["export {} out", "evaluate {}"])
def test_commands_for_runs_say_what_reads_it(command: str, alone: None, tmp_path: Path) -> None:
    model, _ = opened()
    fullshard.save(tmp_path, model=model)
    done = CliRunner().invoke(app, command.format(tmp_path).split())
    assert done.exit_code == 2
    assert "read it with fullshard.load" in " ".join(done.output.split())


def test_a_load_that_fails_changes_nothing(alone: None, tmp_path: Path) -> None:
    model, optimizer = opened()
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    fullshard.save(tmp_path, model=model, optimizer=optimizer, step=1)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    other = torch.optim.SGD([dict(group) for group in optimizer.param_groups], lr=0.5, momentum=0.9)
    other.state[trained[0]]["momentum_buffer"] = torch.zeros_like(trained[0])
    with pytest.raises(CheckpointError, match=r"saved with AdamW, and its state does not fit this SGD \(.*momentum"):
        fullshard.load(tmp_path, model=model, optimizer=other)
    one_group = torch.optim.AdamW(trained)
    with pytest.raises(CheckpointError, match="2 parameter groups"):
        fullshard.load(tmp_path, model=model, optimizer=one_group)
    with pytest.raises(CheckpointError, match="saved without schedule"):
        fullshard.load(tmp_path, model=model, schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert list(other.state) == [trained[0]]
    assert not one_group.state
    assert all(torch.equal(then, now) for then, now in zip(before, model.parameters(), strict=True))


def test_wrong_arguments_of_load(alone: None, tmp_path: Path) -> None:
    model, _ = opened()
    for folder, other, said in (
        (None, model, "fullshard.load: the folder is None"),
        ("", model, "fullshard.load: the folder is empty text"),
        (__file__, model, "is a file, and checkpoints go into a folder"),
        (tmp_path, None, "model = None; it must be an nn.Module"),
    ):
        with pytest.raises(SetupError, match=said):
            fullshard.load(folder, model=other)  # type: ignore[arg-type]
    assert fullshard.load(tmp_path / "best", model=model, missing_ok=True) == {}
    path = fullshard.save(tmp_path, model=model, step=1)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="checkpoint-1 is damaged: manifest.json is missing"):
        fullshard.load(path, model=model, missing_ok=True)
