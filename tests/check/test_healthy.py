"""Healthy recipes of many kinds: a check has nothing to say against them, neither before nor on real ranks."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard.check.command import _merged
from fullshard.config import families
from tests.check import on_ranks
from tests.check.healthy_recipe import Workspace, files_in
from tests.families.audio import small as audio
from tests.families.audio.readings import write_readings
from tests.families.embedding import vision
from tests.families.vision import small as vlm
from tests.ranks import RankPool
from tests.slow import only_first

HEALTHY: dict[str, Callable[[Workspace], None]] = {}
TRIED: list[str] = []
"""Those that are also tried on two ranks."""


def healthy(*, tried: bool = False) -> Callable[[Callable[[Workspace], None]], Callable[[Workspace], None]]:
    def put(make: Callable[[Workspace], None]) -> Callable[[Workspace], None]:
        HEALTHY[make.__name__] = make
        if tried:
            TRIED.append(make.__name__)
        return make

    return put


def _scratch(workspace: Workspace, architecture: str) -> None:
    workspace.recipe["model"] = {"architecture": architecture, "size": "tiny", "overrides": {"vocab_size": 97}}


def _stored_as(workspace: Workspace, dtype: torch.dtype) -> None:
    file = workspace.folder / "model" / "model.safetensors"
    save_file({name: t.to(dtype) for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    config = json.loads((workspace.folder / "model" / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (workspace.folder / "model" / "config.json").write_text(json.dumps(config))


@healthy(tried=True)
def qwen3_full(workspace: Workspace) -> None:
    workspace.recipe["sharding"] = {"strategy": "full"}


@healthy(tried=True)
def llama_grad_op_packed_bf16(workspace: Workspace) -> None:
    _scratch(workspace, "llama")
    workspace.recipe["sharding"] = {"strategy": "grad_op"}
    workspace.recipe["precision"] = "bf16"
    workspace.set("data", pack=True)


@healthy(tried=True)
def gpt2_replicated_fp16(workspace: Workspace) -> None:
    _scratch(workspace, "gpt2")
    workspace.recipe["sharding"] = {"strategy": "none"}
    workspace.recipe["precision"] = "fp16"


@healthy(tried=True)
def mixtral_hybrid(workspace: Workspace) -> None:
    _scratch(workspace, "mixtral")
    workspace.recipe["sharding"] = {"strategy": "hybrid"}


@healthy()
def qwen3_moe_from_scratch(workspace: Workspace) -> None:
    _scratch(workspace, "qwen3_moe")
    workspace.recipe["precision"] = "bf16"


@healthy()
def gemma_with_tied_head(workspace: Workspace) -> None:
    _scratch(workspace, "gemma")
    workspace.set("data", pack=True)


@healthy()
def phi3_from_scratch(workspace: Workspace) -> None:
    _scratch(workspace, "phi3")


@healthy(tried=True)
def adapters_on_chat(workspace: Workspace) -> None:
    workspace.use_texts()
    workspace.set("model", lora={"r": 2})
    workspace.set("data", encode="chat")
    workspace.recipe["precision"] = "bf16"


@healthy()
def packed_chat_with_validation(workspace: Workspace) -> None:
    workspace.use_texts()
    workspace.set("data", encode="chat", pack=True, holdout=0.2, shuffle=True)
    workspace.recipe["evaluate"] = {"every_epochs": 1}
    workspace.recipe["checkpoint"] = {}
    workspace.recipe["duration"] = {"epochs": 2}
    workspace.set("batch", **{"global": 4})


@healthy()
def text_with_prompts(workspace: Workspace) -> None:
    workspace.use_texts()
    workspace.set("data", train=str(workspace.folder / "texts.jsonl"), holdout=0.1, pack=True)
    workspace.recipe["evaluate"] = {"parts": ["loss", {"kind": "sample", "prompts": ["The"], "tokens": 4}]}
    workspace.set("batch", **{"global": 8})


@healthy()
def a_tokenizer_of_its_own(workspace: Workspace) -> None:
    workspace.recipe["model"] = {"architecture": "qwen3", "size": "tiny", "tokenizer": {"train": {"vocab_size": 400}}}
    workspace.set("data", train=str(workspace.folder / "texts.jsonl"), pack=True)


@healthy(tried=True)
def frozen_embedding_and_recomputation(workspace: Workspace) -> None:
    workspace.set("model", freeze=["model.embed_tokens.*", "model.layers.0.*"])
    workspace.recipe["sharding"] = {"activation_checkpointing": "full"}


@healthy(tried=True)
def adapters_on_stored_bf16(workspace: Workspace) -> None:
    _stored_as(workspace, torch.bfloat16)
    workspace.set("model", lora={"r": 2, "targets": ["q_proj", "v_proj"]})
    workspace.recipe["precision"] = "bf16"
    workspace.recipe["sharding"] = {"activation_checkpointing": "selective"}


@healthy(tried=True)
def trained_from_stored_fp16(workspace: Workspace) -> None:
    _stored_as(workspace, torch.float16)
    workspace.recipe["precision"] = "fp16"


@healthy()
def wrapped_by_name(workspace: Workspace) -> None:
    workspace.recipe["sharding"] = {"wrap": ["Qwen3DecoderLayer"], "forward_prefetch": True, "strategy": "full"}
    workspace.words = ["--devices", "2"]


@healthy()
def eight_bit_adam(workspace: Workspace) -> None:
    workspace.recipe["optimizer"] = {"kind": "adamw_8bit", "lr": 1e-3}


@healthy()
def wandb_without_network(workspace: Workspace) -> None:
    workspace.set("log", sinks=["tensorboard", {"kind": "wandb", "mode": "offline"}])


@healthy()
def opt_with_learned_positions(workspace: Workspace) -> None:
    _scratch(workspace, "opt")
    workspace.recipe["schedule"] = {"kind": "cosine", "warmup": 0.1, "floor": 0.1}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found(name: str, workspace: Workspace) -> None:
    HEALTHY[name](workspace)
    before = files_in(workspace.folder)
    result = workspace.run("check", "--quick", "--json")
    report = json.loads(result.stdout)
    assert [f for f in report["findings"] if f["level"] != "ok"] == []
    assert {f["section"] for f in report["findings"]} == {"environment", "recipe", "model", "data"}
    assert (report["correct"], result.exit_code) == (True, 0)
    assert files_in(workspace.folder) == before


@pytest.mark.parametrize("name", only_first(TRIED))
def test_nothing_is_found_on_two_ranks(name: str, workspace: Workspace, ranks: RankPool) -> None:
    HEALTHY[name](workspace)
    report = workspace.folder / "report"
    report.mkdir()
    before = files_in(workspace.folder)
    assert ranks.run(on_ranks.trial, [workspace.recipe] * 2, str(report), str(workspace.folder), world=2) == [0, 0]
    found = _merged(on_ranks.collected(report), 0)
    assert [f for f in found if f.level != "ok"] == []
    assert {"longest batch", "checkpoint", "memory", "exchange", "shared files"} <= {f.check for f in found}
    assert {name: size for name, size in files_in(workspace.folder).items() if not name.startswith("report/")} == before


SHORT = ("data.sequence_length=128", "batch.per_device=2", "batch.global=4", "topology.device=cpu")
BROUGHT = {
    "audio": (),
    "desktop": (),
    "desktop-smolvlm": (*SHORT, "model.path=smolvlm", "data.train=recordings.jsonl", "data.holdout=0.3")
    + ("data.encode.without_image=keep",),
    "diffusion": (),
    "embedding": (),
    "embedding-8b": (*SHORT, "model.path=vision", "model.max_pixels=3136", "objective.matryoshka=[64]")
    + ("objective.cache=4", "data.train=seen/pairs.jsonl", "data.validation=null", "data.holdout=0.2")
    + ("data.encode.image_root=seen/images", "checkpoint.every_steps=5", "evaluate.every_steps=5"),
    "llm": (*SHORT, "model.size=tiny", "model.tokenizer=spoken", "data.train=texts.jsonl", "checkpoint.every_steps=5")
    + ("evaluate.every_steps=5",),
    "paper_r64": (
        *SHORT[1:],
        "model.path=phi4",
        "model.revision=null",
        "data.train=readings.jsonl",
        "data.validation=null",
    )
    + ("data.holdout=0.2", "batch.accumulate=null", "data.sequence_length=512", "optimizer.lr=1e-3"),
    "quickstart": (),
    "sft": (*SHORT, "model=spoken", "data.train=pairs.jsonl"),
    "sft-lora": (*SHORT, "model.path=spoken", "data.train=pairs.jsonl", "model.lora.r=2"),
    "staged": (),
    "vision": (),
}
"""What a user brings to a built-in recipe; a new one needs an entry here."""


@pytest.mark.parametrize("name", sorted(families.recipes()))
def test_a_built_in_recipe_is_healthy(name: str, workspace: Workspace) -> None:
    if name == "desktop-smolvlm":
        vlm.model_folder(workspace.folder / "smolvlm", "smolvlm")
        vlm.write_recordings(workspace.folder / "recordings.jsonl", episodes=8)
    if name == "embedding-8b":
        vision.vision_folder(workspace.folder / "vision", kind="qwen3_vl")
        vision.pictures(workspace.folder / "seen")
    if name == "paper_r64":
        audio.model_folder(workspace.folder / "phi4", "phi4_multimodal")
        write_readings(workspace.folder, 64)
    result = workspace.run_on(name, "check", "--quick", "--json", *BROUGHT[name])
    report = json.loads(result.stdout)
    of_stages = report.get("stages", {"": report}).values()
    assert [f for each in of_stages for f in each["findings"] if f["level"] != "ok"] == []
    assert (report["correct"], result.exit_code) == (True, 0)


def test_there_are_enough() -> None:
    assert len(HEALTHY) >= 12
    assert len(TRIED) >= 5
