"""The laws of stages: a stage continues weights and optimizer state of the one before it exactly, and a run that
stopped in any stage continues as if it had not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import fullshard
from fullshard.checkpoint import folder as files
from fullshard.checkpoint.reader import open_tensors
from fullshard.commands import chosen_run
from fullshard.log.metrics import FILE, read
from fullshard.stages import hand_over
from tests import bucket
from tests.dist.staged_runs import RATES, STEPS, losses, settings, state_at_start, train_stages
from tests.ranks import RankPool
from tests.small import model_folder, token_file

GLOBAL = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stages")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=96)
    return path


@pytest.fixture(scope="module")
def straight(ranks: RankPool, folder: Path) -> dict[str, Any]:
    """Both stages on two ranks."""
    return dict(ranks.run(train_stages, settings(folder, "straight"), world=2)[0])


def plain_loop(folder: Path) -> list[tuple[float, float]]:
    """Two phases without fullshard: one optimizer object for all parameters, embeddings unfrozen in the second."""
    rows = [json.loads(line)["input_ids"] for line in (folder / "train.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    embeddings = model.get_input_embeddings().weight
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    found = []
    for phase, steps in enumerate(STEPS):
        embeddings.requires_grad_(phase == 1)
        for step in range(steps):
            batch = rows[step * GLOBAL : (step + 1) * GLOBAL]
            longest = max(map(len, batch))
            ids = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
            mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
            loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-100)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            for group in optimizer.param_groups:
                group["lr"] = RATES[phase] * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), norm.item()))
    return found


def test_two_stages_are_a_plain_loop_that_unfreezes_in_its_second_phase(folder: Path, straight: dict[str, Any]) -> None:
    ours, theirs = torch.tensor(losses(straight, "first", "second")), torch.tensor(plain_loop(folder))
    torch.testing.assert_close(ours[:, 0], theirs[:, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(
        ours[:, 1], theirs[:, 1], rtol=1e-5, atol=0
    )  # a norm adds up the rounding of all gradients


def stored(folder: Path, name: str, stage: str, step: int) -> dict[str, torch.Tensor]:
    tensors = open_tensors(folder / "runs" / name / stage / files.name_of(step))
    return {name: tensors.whole(name) for name in tensors.names()}


@pytest.mark.parametrize("world", [1, 2])
def test_state_is_carried_bitwise_and_created_for_what_was_frozen(
    ranks: RankPool,
    folder: Path,
    straight: dict[str, Any],
    world: int,
) -> None:
    """On as many ranks as saved it, and on others."""
    before = stored(folder, "straight", "first", STEPS[0])
    after = ranks.run(state_at_start, settings(folder, "straight"), 1, world=world)[0]
    new = {f"optimizer/model.embed_tokens.weight/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert after.keys() - before.keys() == new | {"model/model.embed_tokens.weight"}  # the model's folder had it
    assert not any(after[name].any() for name in new), "as AdamW creates it"
    assert before["optimizer/model.norm.weight/step"] == STEPS[0]
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_fresh_state_is_not_carried(ranks: RankPool, folder: Path, straight: dict[str, Any]) -> None:
    run = settings(folder, "straight", second={"start": {"optimizer": "fresh"}})
    after = ranks.run(state_at_start, run, 1, world=1)[0]
    assert not [name for name in after if name.startswith("optimizer/")], "AdamW creates it in the first step"


def test_a_frozen_part_moves_only_from_its_stage_on(folder: Path, straight: dict[str, Any]) -> None:
    name = "model.embed_tokens.weight"
    given = AutoModelForCausalLM.from_pretrained(folder / "model").get_parameter(name)
    first = AutoModelForCausalLM.from_pretrained(folder / "runs" / "straight" / "first" / "model").get_parameter(name)
    second = stored(folder, "straight", "second", STEPS[1])[f"model/{name}"]
    assert torch.equal(first, given)
    assert not torch.equal(second, given)


def test_a_run_that_stopped_in_its_second_stage_continues_there(
    ranks: RankPool,
    folder: Path,
    straight: dict[str, Any],
) -> None:
    second = copied(folder, "stopped") / "second"
    for step in (4, 6):  # what a kill after the save of step 2 leaves
        shutil.rmtree(second / files.name_of(step))
    shutil.rmtree(second / "model")
    files.point(second, "last", second / files.name_of(2))
    found = ranks.run(train_stages, settings(folder, "stopped"), world=2)[0]
    assert found["said"] == ["Stage 1 of 2: first is finished (4 steps)."]
    assert found["trained"] == ["second"]
    assert losses(found, "first", "second") == losses(straight, "first", "second")
    ours, theirs = (stored(folder, name, "second", STEPS[1]) for name in ("stopped", "straight"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _sign(state: Path) -> None:
    """The manifest of a checkpoint whose state.json was edited."""
    import hashlib

    path = state.parent / "manifest.json"
    manifest = json.loads(path.read_text())
    content = state.read_bytes()
    manifest["files"]["state.json"] = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(manifest))


def test_world_sizes_may_differ_between_stages(ranks: RankPool, folder: Path, straight: dict[str, Any]) -> None:
    run = settings(folder, "worlds")
    ranks.run(train_stages, run, world=1, only="first")
    found = ranks.run(train_stages, run, world=2, only="second")[0]
    ours, theirs = (torch.tensor(losses(each, "first", "second")) for each in (found, straight))
    torch.testing.assert_close(ours[:, 0], theirs[:, 0], rtol=1e-6, atol=0)


def test_starting_over_moves_the_stages_after_it_aside(ranks: RankPool, folder: Path) -> None:
    run = settings(folder, "over", first={"duration": {"steps": 1}}, second={"duration": {"steps": 1}})
    ranks.run(train_stages, run, world=1)
    again = ranks.run(train_stages, run, world=1, resume="never")[0]
    assert again["trained"] == ["first", "second"]
    kept = {path.name for path in (folder / "runs" / "over").iterdir() if not path.name.startswith(".")}
    assert kept == {"first", "second", "first.old-1", "second.old-1", "model", "last"}
    ranks.run(train_stages, run, world=1, resume="never", only="second")
    kept = {path.name for path in (folder / "runs" / "over").iterdir()}
    assert "second.old-2" in kept
    assert "first.old-2" not in kept


def test_a_change_of_a_finished_stage_is_said(ranks: RankPool, folder: Path, straight: dict[str, Any]) -> None:
    run = settings(folder, "straight", first={"duration": {"steps": 4}, "optimizer": {"lr": 3e-2}})
    found = ranks.run(train_stages, run, world=1)[0]
    assert found["trained"] == []
    # The second stage was trained with the settings of the recipe that the first has no longer.
    assert found["said"][0] == "Stage 1 of 2: first is finished (4 steps)."
    assert "its recipe has changed since, which has no effect, because second has started from it" in found["said"][1]
    assert "optimizer.lr: 0.01 then, 0.03 now" in found["said"][1]
    assert "--stage first --resume never" in found["said"][1]


def test_the_best_of_a_stage_is_the_start_of_the_next_when_asked(ranks: RankPool, folder: Path) -> None:
    """By the highest loss, so that the best checkpoint of the first stage is not its last."""
    held_out = {"data": {"holdout": 0.2}, "evaluate": {"parts": ["loss"], "every_steps": 1}}
    rule = {"duration": {"steps": 3}, "checkpoint": {"best": {"metric": "loss", "mode": "max"}}, **held_out}
    run = settings(folder, "best", first=rule, second={"duration": {"steps": 1}, "start": {"weights": "best"}})
    ranks.run(train_stages, run, world=1)
    place = folder / "runs" / "best" / "first"
    best = files.pointed(place, "best")
    assert best is not None
    assert best.name == "checkpoint-1"
    begun = ranks.run(state_at_start, run, 1, world=1)[0]
    tensors = open_tensors(best)
    for name in tensors.names():
        assert torch.equal(begun[name], tensors.whole(name)), name


def test_metrics_have_the_stage_and_the_step_of_the_run(straight: dict[str, Any], folder: Path) -> None:
    rows = [row for stage in ("first", "second") for row in straight[stage] if row["kind"] == "train"]
    assert [(row["stage"], row["step"], row["total_step"]) for row in rows] == [
        *(("first", step, step) for step in range(1, STEPS[0] + 1)),
        *(("second", step, STEPS[0] + step) for step in range(1, STEPS[1] + 1)),
    ]
    run = folder / "runs" / "straight"
    assert {name: (run / name).readlink().as_posix() for name in ("model", "last")} == {
        "model": "second/model",
        "last": "second/last",
    }
    assert files.named(run) == (run / "second" / "checkpoint-6").resolve()


def copied(folder: Path, name: str) -> Path:
    """A copy of the straight run, whose recipe says the same but for the folder."""
    run = folder / "runs" / name
    shutil.copytree(folder / "runs" / "straight", run, symlinks=True)
    for state in run.glob("*/*/state.json"):
        state.write_text(state.read_text().replace("runs/straight", f"runs/{name}"))
        _sign(state)
    return run


def test_a_stage_notices_that_its_start_was_trained_again(
    ranks: RankPool, folder: Path, straight: dict[str, Any]
) -> None:
    """With the same settings, so that only the identity of the checkpoint tells."""
    run, chosen = copied(folder, "again"), settings(folder, "again")
    assert ranks.run(train_stages, chosen, world=2)[0]["said"] == [
        "Stage 1 of 2: first is finished (4 steps).",
        "Stage 2 of 2: second is finished (6 steps).",
    ]
    path = run / "first" / "checkpoint-4" / "manifest.json"  # as other weights would have it
    manifest = json.loads(path.read_text())
    manifest["files"]["__0_0.distcp"]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    said = ranks.run(train_stages, chosen, world=1)[0]["said"]
    assert "warning: first has been trained again since, and second comes from what it was before." in said[-1]
    shutil.rmtree(run / "second" / "checkpoint-6")
    shutil.rmtree(run / "second" / "model")
    files.point(run / "second", "last", run / "second" / "checkpoint-4")
    with pytest.raises(AssertionError, match="second is at step 4, and first, which it started from, has been trained"):
        ranks.run(train_stages, chosen, world=1)
    found = ranks.run(train_stages, chosen, world=2, anyway=True)[0]
    assert "It continues anyway" in found["said"][-1]
    assert losses(found, "second") == losses(straight, "second")
    kept = [files.read_state(run / "second" / f"checkpoint-{step}")["start"]["identity"] for step in (2, 6)]
    assert kept[0] == kept[1], "a resumed run still says what it started from"


def test_a_damaged_start_is_refused(ranks: RankPool, folder: Path, straight: dict[str, Any]) -> None:
    run = copied(folder, "damaged")
    shutil.rmtree(run / "second")
    path = run / "first" / "checkpoint-4" / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(AssertionError, match=r"checkpoint-4, which this run starts from, is damaged: .*__1_0\.distcp"):
        ranks.run(train_stages, settings(folder, "damaged"), world=2)


def test_a_stage_whose_manifest_is_damaged_starts_over(ranks: RankPool, folder: Path, straight: dict[str, Any]) -> None:
    run = copied(folder, "manifest")
    (run / "first" / "checkpoint-4" / "manifest.json").write_text("{")
    found = ranks.run(train_stages, settings(folder, "manifest"), world=2, resume="never")[0]
    assert found["trained"] == ["first", "second"]
    assert losses(found, "first", "second") == losses(straight, "first", "second")


def test_the_run_points_at_the_last_stage_that_was_trained(ranks: RankPool, folder: Path) -> None:
    """Not at the best of the first one if the second has none, and not back at the first if that is asked for."""
    held_out = {"data": {"holdout": 0.2}, "evaluate": {"parts": ["loss"], "every_steps": 1}}
    first = {"duration": {"steps": 1}, "checkpoint": {"best": {"metric": "loss"}}, **held_out}
    chosen = settings(folder, "pointers", first=first, second={"duration": {"steps": 1}})
    run = folder / "runs" / "pointers"
    ranks.run(train_stages, chosen, world=1, only="first")
    assert {name: os.readlink(run / name) for name in ("model", "best", "last")} == {
        name: f"first/{name}" for name in ("model", "best", "last")
    }
    ranks.run(train_stages, chosen, world=1)
    ranks.run(train_stages, chosen, world=1, only="first")
    assert {name: os.readlink(run / name) for name in ("model", "last")} == {
        name: f"second/{name}" for name in ("model", "last")
    }
    assert not (run / "best").is_symlink()


def test_a_hand_over_is_proven_bit_by_bit(ranks: RankPool, folder: Path, straight: dict[str, Any]) -> None:
    run, chosen = copied(folder, "handed"), settings(folder, "handed", second={"duration": {"steps": 1}})
    shutil.rmtree(run / "second")
    second = (fullshard.read(chosen).stages or [])[1]
    hand_over.request(second.folder)
    ranks.run(train_stages, chosen, world=2)
    found = hand_over.look(second)
    assert found.title == "starts from first: 34 weights, 34 optimizer states, 1 new"
    assert (found.word, found.drift) == ("bitwise", None)
    assert second.start is not None
    other = second.start.model_copy(update={"source": str(run / "first" / "checkpoint-2")})
    found = hand_over.look(second.model_copy(update={"start": other}))
    assert found.word == "136 differ", "weights, moments and counts of steps of an earlier checkpoint"
    assert "before the first step, 136 tensors differ from" in str(found.drift)


@pytest.mark.parametrize("kind", ["file", "bucket"])
def test_a_run_in_a_store_has_pointers_there(ranks: RankPool, folder: Path, kind: str) -> None:
    store = f"file://{folder}/store" if kind == "file" else bucket.url(folder / "bucket")
    once = {"duration": {"steps": 1}}
    chosen = settings(folder, kind, checkpoint={"store": store, "every_steps": 1}, first=once, second=once)
    ranks.run(train_stages, chosen, world=2, only="first")
    place = files.place(f"{store}/{kind}")
    assert files.named(place).parent.name == "first"
    found = ranks.run(train_stages, chosen, world=2)[0]
    assert found["trained"] == ["second"]
    assert files.named(place) == files.named(f"{store}/{kind}/last") == files.pointed(place / "second", "last")
    exported, own = ((place / part / "model.safetensors").read_bytes() for part in ("model", "second/model"))
    assert exported == own
    local = folder / "runs" / kind
    assert (local / "model" / "model.safetensors").read_bytes() == own
    assert chosen_run.choose(str(local), None, here=lambda recipe, checkpoint: recipe).checkpoint == files.named(place)


def test_a_store_that_refuses_the_pointers_does_not_fail_the_run(ranks: RankPool, folder: Path) -> None:
    store = bucket.url(folder / "refusing")
    (folder / "refusing" / bucket.REFUSING).write_text(".model-of")
    once = {"duration": {"steps": 1}}
    found = ranks.run(
        train_stages, settings(folder, "refused", checkpoint={"store": store}, first=once, second=once), world=1
    )[0]
    assert found["trained"] == ["first", "second"]
    assert "warning: model, best and last of refused could not be updated: " in found["said"][0]


@pytest.mark.slow  # starts ranks three times
def test_a_run_that_is_killed_in_its_second_stage_resumes_there_bitwise(folder: Path, straight: dict[str, Any]) -> None:
    run = settings(folder, "killed", topology={"device": "cpu", "devices": 2})
    path, second = folder / "killed.yaml", folder / "runs" / "killed" / "second"
    path.write_text(yaml.safe_dump(run))
    kill = {"kind": "fullshard.prove.kill.Kill", "step": 3, "of": str(second)}
    command = [sys.executable, "-m", "fullshard", "train", str(path)]
    killer = f"stages.second.evaluate={json.dumps({'parts': [kill], 'every_steps': 1})}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([*command, killer], capture_output=True, text=True, env=environment, check=False)
    assert killed.returncode not in (0, 2), killed.stderr
    assert (second / "killed-3").exists(), killed.stdout + killed.stderr
    resumed = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert "Stage 1 of 2: first is finished (4 steps)." in resumed.stdout
    assert "fullshard: killed, stage 2 of 2: second (after 4 steps)" in resumed.stdout
    assert f"{second}/checkpoint-2 at step 2" in " ".join(resumed.stdout.split())  # a long path wraps the line
    assert losses({"second": read(second / FILE)}, "second") == losses(straight, "second")
    ours, theirs = (stored(folder, name, "second", STEPS[1]) for name in ("killed", "straight"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
