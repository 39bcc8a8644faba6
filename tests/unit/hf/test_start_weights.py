"""`model.from`: checkpoints and files with a whole state, their names, and what is never run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fullshard.config.part import decode, plain
from fullshard.contracts.model import Family
from fullshard.errors import CheckpointError, RecipeError
from fullshard.families.language.models.hf import Hf
from tests.unit.hf.architectures import build

LORA: Any = {"r": 2, "alpha": 4}


def section(**values: Any) -> Hf:
    family = decode(Family, values, where="model")
    assert isinstance(family, Hf)
    return family


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], model: dict[str, Any] | None) -> Path:
    """A finished checkpoint of the full format, as far as its weights go."""
    folder.mkdir(parents=True)
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    save_file({}, folder / "optimizer.safetensors")
    described = {"model.safetensors": {"size_bytes": 0, "sha256": ""}}  # nobody looks here
    (folder / "manifest.json").write_text(json.dumps({"step": 3, "format": "full", "files": described}))
    (folder / "state.json").write_text(json.dumps({"recipe": {"model": model}} if model else {}))
    return folder


def read(family: Hf) -> tuple[dict[str, torch.Tensor], Any]:
    """Every stored value, in two slices, and the module."""
    module = family.build(processor=None)
    weights = family.weights(module)
    assert weights is not None
    tensors = module.state_dict(keep_vars=True)
    found = {}
    for name in weights.names():
        rows = tensors[name].shape[0]
        found[name] = torch.cat([weights.read(name, 0, rows // 2), weights.read(name, rows // 2, rows)])
    return found, module


@pytest.fixture
def whole() -> dict[str, torch.Tensor]:
    """The values of a model that ties its head; the tied tensor once, as checkpoints have it."""
    torch.manual_seed(5)
    return {name: torch.randn_like(p) for name, p in build("gemma").named_parameters()}


SCRATCH = {"kind": "hf", "architecture": "gemma", "size": "tiny"}


def test_a_checkpoint_alone_brings_its_model(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    written = plain(section(**SCRATCH))
    folder = checkpoint(tmp_path / "run/checkpoint-3", whole, written)
    family = section(**{"from": str(folder)})
    assert (family.architecture, family.size, family.start) == ("gemma", "tiny", str(folder))
    assert section(**plain(family)) == family, "a resolved recipe reads back"
    assert plain(family)["from"] == str(folder)
    found, _ = read(family)
    assert found.keys() == {*whole, "lm_head.weight"}, "a tied tensor answers to both names"
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name
    assert family.stored_in() is None
    last = tmp_path / "run/last"
    last.symlink_to("checkpoint-3")
    for same in (last, tmp_path / "run"):
        assert section(**{"from": str(same)}).architecture == "gemma"


def test_a_whole_checkpoint_under_new_adapters(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    folder = checkpoint(tmp_path / "c", whole, SCRATCH)
    found, module = read(section(**{"from": str(folder), "lora": LORA}))
    name = "model.layers.0.self_attn.q_proj.base_layer.weight"
    assert torch.equal(found[name], whole["model.layers.0.self_attn.q_proj.weight"])
    fresh = {n for n, _ in module.named_parameters()} - found.keys()
    assert fresh == {n for n, _ in module.named_parameters() if "lora_" in n}, "they begin fresh"
    assert module.peft_config["default"].base_model_name_or_path == str(folder), "the base is not model.path"


def test_adapters_over_the_folder_that_they_were_trained_on(tmp_path: Path, caplog: Any) -> None:
    base: Any = build("gemma")
    base.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    recorded = plain(section(path=str(tmp_path / "base"), lora=LORA))
    module = Hf(path=str(tmp_path / "base"), lora=LORA).build(processor=None)
    adapters = {n: torch.randn(p.shape) for n, p in module.named_parameters() if p.requires_grad}
    folder = checkpoint(tmp_path / "c", adapters, recorded)
    family = section(**{"from": str(folder)})
    found, module = read(family)
    assert found.keys() == dict(module.named_parameters(remove_duplicate=False)).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in adapters.items())
    name = "model.layers.1.mlp.up_proj.base_layer.weight"
    assert torch.equal(found[name], base.get_parameter("model.layers.1.mlp.up_proj.weight"))
    assert family.storage_dtype(name, module.get_parameter(name)) == torch.bfloat16
    assert family.stored_in() == tmp_path / "base"
    read(section(**{"from": str(folder), "path": str(tmp_path / "base"), "lora": {**LORA, "alpha": 9}}))
    assert "model.lora.alpha = 9, but the adapters of model.from were trained with 4" in caplog.text
    with pytest.raises(CheckpointError, match="adapter tensors .*but this model has no adapters"):
        read(section(**{"from": str(folder), "path": str(tmp_path / "base")}))
    with pytest.raises(CheckpointError, match=r"of another shape: .*lora_A.* \[2, 128\] \(the model has \[3, 128\]\)"):
        read(section(**{"from": str(folder), "path": str(tmp_path / "base"), "lora": 3}))
    with pytest.raises(CheckpointError, match=r"holds adapters, but no base model. Name the base in model\.path"):
        read(section(**{**SCRATCH, "from": str(folder), "lora": LORA}))
    with pytest.raises(RecipeError, match="has adapters and their settings. Leave model.lora out"):
        section(**{"from": str(folder), "lora": 3})


def test_a_whole_checkpoint_under_a_stored_adapter(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    from peft import LoraConfig, get_peft_model

    base: Any = build("gemma")
    base.save_pretrained(tmp_path / "base")
    peft: Any = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    peft.save_pretrained(tmp_path / "adapter")
    folder = checkpoint(tmp_path / "c", whole, None)
    values = {"path": str(tmp_path / "adapter"), "base": str(tmp_path / "base"), "from": str(folder)}
    found, module = read(section(**values))
    layer, before = module.get_submodule("model.layers.0.self_attn.q_proj"), "model.layers.0.self_attn.q_proj"
    assert torch.equal(found[f"{before}.base_layer.weight"], whole[f"{before}.weight"])
    stored = peft.get_parameter(f"base_model.model.{before}.lora_A.default.weight")
    assert torch.equal(found[f"{before}.lora_A.default.weight"], stored)
    assert layer.r["default"] == 8


def test_frozen_parameters_that_a_checkpoint_leaves_out(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    base: Any = build("gemma")
    base.save_pretrained(tmp_path / "base")
    frozen = "model.embed_tokens.weight"
    rest = {name: t for name, t in whole.items() if name != frozen}
    recorded = plain(section(path=str(tmp_path / "base"), freeze=["model.embed_tokens.*"]))
    found, _ = read(section(**{"from": str(checkpoint(tmp_path / "c", rest, recorded))}))
    assert torch.equal(found[frozen], base.get_parameter(frozen))
    assert torch.equal(found["model.norm.weight"], whole["model.norm.weight"])
    unfrozen = checkpoint(tmp_path / "d", rest, {**recorded, "freeze": []})
    with pytest.raises(CheckpointError, match=f"2 missing: {frozen}, lm_head.weight"):
        read(section(**{"from": str(unfrozen)}))


def test_names_and_shapes_are_strict_both_ways(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    wrong = {**whole, "extra": torch.zeros(2), "model.embed_tokens.weight": torch.zeros(1000, 128)}
    del wrong["model.norm.weight"]
    folder = checkpoint(tmp_path / "c", wrong, SCRATCH)
    with pytest.raises(CheckpointError) as caught:
        read(section(**{"from": str(folder)}))
    message = str(caught.value)
    assert f"model.from = '{folder}' does not hold the weights of GemmaForCausalLM" in message
    assert "1 missing: model.norm.weight" in message
    assert "1 not part of the model: extra" in message
    assert "model.embed_tokens.weight [1000, 128] (the model has [1024, 128])" in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"from": "absent"}, "model.from = 'absent': absent: no such folder"),
        ({"from": "base"}, "this is a model folder, not a checkpoint. Name it in model.path"),
        ({"from": "unsaid"}, "holds no settings of its model. Set model.path or model.architecture"),
        ({"from": "trained"}, "its run trained a tokenizer, and the checkpoint does not hold it"),
        ({"from": "state.pt"}, "model.from = 'state.pt' holds only tensors. Set model.path"),
        ({"from": "good", "size": "1B"}, "model.size goes with model.path or model.architecture"),
        (
            {"architecture": "gemma", "size": "tiny", "base": "x"},
            "model.base and model.architecture exclude",
        ),
    ],
)
def test_starts_that_say_too_little_or_too_much(
    values: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(Path("unsaid"), {}, None)
    checkpoint(Path("good"), {}, SCRATCH)
    checkpoint(Path("trained"), {}, {**SCRATCH, "tokenizer": {"train": {"vocab_size": 400}}})
    Path("base").mkdir()
    Path("base/config.json").write_text("{}")
    with pytest.raises(RecipeError, match=message):
        section(**values)


def test_a_checkpoint_brings_its_tokenizer_and_no_right_to_run_code(tmp_path: Path) -> None:
    recorded = {**SCRATCH, "tokenizer": {"train": {"vocab_size": 400}}, "trust_remote_code": True}
    folder = checkpoint(tmp_path / "run/checkpoint-3", {}, recorded)
    (folder / "processor").mkdir()
    family = section(**{"from": str(folder)})
    assert family.tokenizer
    assert family.tokenizer.path == str(folder / "processor")
    assert not family.trust_remote_code
    (tmp_path / "run/last").symlink_to("checkpoint-3")
    moved = section(**{"from": str(tmp_path / "run")}).tokenizer
    assert moved
    assert moved.path == str(tmp_path / "run/last/processor"), "the same setting when the run goes on"


def test_a_tokenizer_in_a_remote_checkpoint(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from upath import UPath

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}))).save_pretrained(tmp_path)
    remote = UPath("memory://test_start/run/checkpoint-3")
    (remote / "processor").mkdir(parents=True)
    for file in tmp_path.iterdir():
        (remote / "processor" / file.name).write_bytes(file.read_bytes())
    (remote / "manifest.json").write_text('{"files": {}}')
    (remote / "state.json").write_text(json.dumps({"recipe": {"model": SCRATCH}}))
    family = section(**{"from": "memory://test_start/run/checkpoint-3"})
    family.prepare([], cache=tmp_path / "cache")
    assert family.processor(cache=tmp_path / "cache").get_vocab() == {"a": 0, "b": 1}


def test_a_checkpoint_in_the_place_of_a_model(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run/checkpoint-3", {}, SCRATCH)
    for place in (tmp_path / "run", tmp_path / "run/checkpoint-3"):
        with pytest.raises(RecipeError, match=r"holds fullshard checkpoints, not a model. Name it in model\.from"):
            Hf(path=str(place)).build(processor=None)


@pytest.mark.parametrize("form", ["flat", "model", "state_dict", "module", "safetensors"])
def test_a_whole_state_in_one_file(form: str, tmp_path: Path) -> None:
    model: Any = build("qwen3_moe")
    state = {f"module.{name.replace('.mlp.', '._orig_mod.mlp.')}": t for name, t in model.state_dict().items()}
    file = tmp_path / "state.pt"
    if form == "safetensors":
        file = tmp_path / "state.safetensors"
        save_file(state, file)
    else:
        torch.save(state if form == "flat" else {form: state, "step": 3}, file)
    found, _ = read(section(architecture="qwen3_moe", size="tiny", **{"from": str(file)}))
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_a_state_is_mapped_and_not_read(tmp_path: Path) -> None:
    from fullshard.hf.weights.state_file import open_state

    torch.save({"x": torch.arange(6_000_000.0).reshape(-1, 3)}, tmp_path / "state.pt")
    stored: Any = open_state(tmp_path / "state.pt")
    with (tmp_path / "state.pt").open("r+b") as file:  # a value changed on disk is seen by whoever reads later
        at = file.read().index(torch.arange(3.0, 9.0).numpy().tobytes())
        file.seek(at)
        file.write(torch.full((3,), 7.0).numpy().tobytes())
    assert stored.read("x", 0, 3).tolist() == [[0, 1, 2], [7, 7, 7], [6, 7, 8]]


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_pickle_is_refused_and_not_run(zipped: bool, tmp_path: Path) -> None:
    ran, file = tmp_path / "ran", tmp_path / "state.pt"
    torch.save({"x": Payload(ran)}, file, _use_new_zipfile_serialization=zipped)
    family = section(architecture="llama", size="tiny", **{"from": str(file)})
    said = (
        r"holds more than tensors \(posix\.system\); loading it could run code" if zipped else "not in torch.save's zip"
    )
    with pytest.raises(CheckpointError, match=said):
        read(family)
    assert not ran.exists()
    torch.load(file, weights_only=False)
    assert ran.exists(), "the payload is a real one"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds list, but a mapping from name to tensor is needed"),
        ({"a": torch.zeros(1), "epoch": 3}, "1 of its 2 entries are not plain tensors: epoch"),
        ({"module.a": torch.zeros(1), "module._orig_mod.a": torch.zeros(1)}, "1 of its 2 names are duplicates"),
        (None, "cannot be read as a torch state"),
    ],
)
def test_files_that_hold_no_state(content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "state.pth"
    if content is None:
        file.write_bytes(b"PK\x03\x04 cut short")
    else:
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=message):
        read(section(architecture="llama", size="tiny", **{"from": str(file)}))
