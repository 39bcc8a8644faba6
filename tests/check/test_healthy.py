"""Healthy recipes of many kinds: a check has nothing to say against them, neither before nor on real ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard.check.command import _merged
from fullshard.config import families
from tests.check import on_ranks
from tests.check.healthy_recipe import Seed, everything, healthy_place, seed_in
from tests.families.embedding import vision
from tests.ranks import RankPool
from tests.slow import only_first

HEALTHY: dict[str, Callable[[Seed], None]] = {}
TRIED: list[str] = []
"""Those that are also tried on two ranks."""


def healthy(*, tried: bool = False) -> Callable[[Callable[[Seed], None]], Callable[[Seed], None]]:
    def put(make: Callable[[Seed], None]) -> Callable[[Seed], None]:
        HEALTHY[make.__name__] = make
        if tried:
            TRIED.append(make.__name__)
        return make

    return put


def _scratch(seed: Seed, architecture: str) -> None:
    seed.recipe["model"] = {"architecture": architecture, "size": "tiny", "overrides": {"vocab_size": 97}}


def _stored_as(seed: Seed, dtype: torch.dtype) -> None:
    file = seed.folder / "model" / "model.safetensors"
    save_file({name: t.to(dtype) for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    config = json.loads((seed.folder / "model" / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (seed.folder / "model" / "config.json").write_text(json.dumps(config))


@healthy(tried=True)
def qwen3_full(seed: Seed) -> None:
    seed.recipe["sharding"] = {"strategy": "full"}


@healthy(tried=True)
def llama_grad_op_packed_bf16(seed: Seed) -> None:
    _scratch(seed, "llama")
    seed.recipe["sharding"] = {"strategy": "grad_op"}
    seed.recipe["precision"] = "bf16"
    seed.set("data", pack=True)


@healthy(tried=True)
def gpt2_replicated_fp16(seed: Seed) -> None:
    _scratch(seed, "gpt2")
    seed.recipe["sharding"] = {"strategy": "none"}
    seed.recipe["precision"] = "fp16"


@healthy(tried=True)
def mixtral_hybrid(seed: Seed) -> None:
    _scratch(seed, "mixtral")
    seed.recipe["sharding"] = {"strategy": "hybrid"}


@healthy()
def qwen3_moe_from_scratch(seed: Seed) -> None:
    _scratch(seed, "qwen3_moe")
    seed.recipe["precision"] = "bf16"


@healthy()
def gemma_with_tied_head(seed: Seed) -> None:
    _scratch(seed, "gemma")
    seed.set("data", pack=True)


@healthy()
def phi3_from_scratch(seed: Seed) -> None:
    _scratch(seed, "phi3")


@healthy(tried=True)
def adapters_on_chat(seed: Seed) -> None:
    seed.speak()
    seed.set("model", lora={"r": 2})
    seed.set("data", encode="chat")
    seed.recipe["precision"] = "bf16"


@healthy()
def packed_chat_with_validation(seed: Seed) -> None:
    seed.speak()
    seed.set("data", encode="chat", pack=True, holdout=0.2, shuffle=True)
    seed.recipe["evaluate"] = {"every_epochs": 1}
    seed.recipe["checkpoint"] = {}
    seed.recipe["duration"] = {"epochs": 2}
    seed.set("batch", **{"global": 4})


@healthy()
def text_with_prompts(seed: Seed) -> None:
    seed.speak()
    seed.set("data", train=str(seed.folder / "texts.jsonl"), holdout=0.1, pack=True)
    seed.recipe["evaluate"] = {"parts": ["loss", {"kind": "sample", "prompts": ["The"], "tokens": 4}]}
    seed.set("batch", **{"global": 8})


@healthy()
def a_tokenizer_of_its_own(seed: Seed) -> None:
    seed.recipe["model"] = {"architecture": "qwen3", "size": "tiny", "tokenizer": {"train": {"vocab_size": 400}}}
    seed.set("data", train=str(seed.folder / "texts.jsonl"), pack=True)


@healthy(tried=True)
def frozen_embedding_and_recomputation(seed: Seed) -> None:
    seed.set("model", freeze=["model.embed_tokens.*", "model.layers.0.*"])
    seed.recipe["sharding"] = {"activation_checkpointing": "full"}


@healthy(tried=True)
def adapters_on_stored_bf16(seed: Seed) -> None:
    _stored_as(seed, torch.bfloat16)
    seed.set("model", lora={"r": 2, "targets": ["q_proj", "v_proj"]})
    seed.recipe["precision"] = "bf16"
    seed.recipe["sharding"] = {"activation_checkpointing": "selective"}


@healthy(tried=True)
def trained_from_stored_fp16(seed: Seed) -> None:
    _stored_as(seed, torch.float16)
    seed.recipe["precision"] = "fp16"


@healthy()
def wrapped_by_name(seed: Seed) -> None:
    seed.recipe["sharding"] = {"wrap": ["Qwen3DecoderLayer"], "forward_prefetch": True, "strategy": "full"}
    seed.words = ["--devices", "2"]


@healthy()
def eight_bit_adam(seed: Seed) -> None:
    seed.recipe["optimizer"] = {"kind": "adamw_8bit", "lr": 1e-3}


@healthy()
def wandb_without_network(seed: Seed) -> None:
    seed.set("log", sinks=["tensorboard", {"kind": "wandb", "mode": "offline"}])


@healthy()
def opt_with_learned_positions(seed: Seed) -> None:
    _scratch(seed, "opt")
    seed.recipe["schedule"] = {"kind": "cosine", "warmup": 0.1, "floor": 0.1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy_place(tmp_path_factory.mktemp("healthy"))


@pytest.fixture
def seed(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seed:
    return seed_in(tmp_path, place, monkeypatch)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found(name: str, seed: Seed) -> None:
    HEALTHY[name](seed)
    before = everything(seed.folder)
    result = seed.ask("check", "--quick", "--json")
    told = json.loads(result.stdout)
    assert [f for f in told["findings"] if f["level"] != "ok"] == []
    assert {f["section"] for f in told["findings"]} == {"environment", "recipe", "model", "data"}
    assert (told["correct"], result.exit_code) == (True, 0)
    assert everything(seed.folder) == before


@pytest.mark.parametrize("name", only_first(TRIED))
def test_nothing_is_found_on_two_ranks(name: str, seed: Seed, ranks: RankPool) -> None:
    HEALTHY[name](seed)
    told = seed.folder / "told"
    told.mkdir()
    before = everything(seed.folder)
    assert ranks.run(on_ranks.trial, [seed.recipe] * 2, str(told), str(seed.folder), world=2) == [0, 0]
    found = _merged(on_ranks.collected(told), 0)
    assert [f for f in found if f.level != "ok"] == []
    assert {"longest batch", "checkpoint", "memory", "exchange", "shared files"} <= {f.check for f in found}
    assert {name: size for name, size in everything(seed.folder).items() if not name.startswith("told/")} == before


SHORT = ("data.sequence_length=128", "batch.per_device=2", "batch.global=4", "topology.device=cpu")
BROUGHT = {
    "desktop": (),
    "diffusion": (),
    "embedding": (),
    "embedding-8b": (*SHORT, "model.path=vision", "model.max_pixels=3136", "objective.matryoshka=[64]")
    + ("objective.cache=4", "data.train=seen/pairs.jsonl", "data.validation=null", "data.holdout=0.2")
    + ("data.encode.image_root=seen/images", "checkpoint.every_steps=5", "evaluate.every_steps=5"),
    "llm": (*SHORT, "model.size=tiny", "model.tokenizer=spoken", "data.train=texts.jsonl", "checkpoint.every_steps=5")
    + ("evaluate.every_steps=5",),
    "quickstart": (),
    "sft": (*SHORT, "model=spoken", "data.train=pairs.jsonl"),
    "sft-lora": (*SHORT, "model.path=spoken", "data.train=pairs.jsonl", "model.lora.r=2"),
    "vision": (),
}
"""What a user brings to a built-in recipe; a new one needs an entry here."""


@pytest.mark.parametrize("name", sorted(families.recipes()))
def test_a_built_in_recipe_is_healthy(name: str, seed: Seed) -> None:
    if name == "embedding-8b":
        vision.vision_folder(seed.folder / "vision", kind="qwen3_vl")
        vision.pictures(seed.folder / "seen")
    result = seed.ask_for(name, "check", "--quick", "--json", *BROUGHT[name])
    told = json.loads(result.stdout)
    assert [f for f in told["findings"] if f["level"] != "ok"] == []
    assert (told["correct"], result.exit_code) == (True, 0)


def test_there_are_enough() -> None:
    assert len(HEALTHY) >= 12
    assert len(TRIED) >= 5
