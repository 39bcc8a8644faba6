"""`fullshard export`: what was trained on two ranks, as files that Transformers, peft, torch and safetensors load."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.log.metrics import read as read_metrics
from tests.cards import card, run_code
from tests.near import assert_near
from tests.ranks import RankPool
from tests.small import VOCABULARY, curve, model_folder, recipe, token_file, train

IDS = torch.arange(30).mul(7).remainder(VOCABULARY).reshape(2, 15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    """A tied model in fp32, trained whole and by adapters; every checkpoint comes from two ranks."""
    path = tmp_path_factory.mktemp("export")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=32)
    short = {"duration": {"steps": 2}, "optimizer": {"lr": 5e-2}}
    lora = {"path": str(path / "model"), "lora": {"r": 3, "alpha": 9}}
    ranks.run(train, recipe(path, name="whole", **short), world=2)
    ranks.run(train, recipe(path, name="adapters", model=lora, **short), world=2)
    ranks.run(train, recipe(path, name="full", **short, checkpoint={"format": "full"}), world=2)
    return path


def export(*words: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def saved(run: Path) -> dict[str, torch.Tensor]:
    """The model's tensors of a sharded checkpoint, by torch's own converter."""
    dcp_to_torch_save(run / "last", run / "all.pt")
    state = torch.load(run / "all.pt", weights_only=True)
    return {name.removeprefix("model/"): t for name, t in state.items() if name.startswith("model/")}


def rewrite(path: Path, text: str) -> None:
    """Other facts in a checkpoint, as if it had been saved with them."""
    path.write_text(text)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest["files"][path.name] = {"size_bytes": path.stat().st_size, "sha256": digest}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


@pytest.fixture(scope="module")
def trained(folder: Path) -> torch.Tensor:
    """Logits of the trained model, by torch and Transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    start = logits(model)
    model.load_state_dict(saved(folder / "runs" / "whole"), strict=False)
    model.tie_weights()
    assert not torch.allclose(start, logits(model), atol=1e-2)
    return logits(model)


@pytest.fixture(scope="module")
def adapted(folder: Path) -> Any:
    """The model with its trained adapters, by peft alone; its tensors come from torch's own reader of checkpoints."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=9, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), config)
    state = saved(folder / "runs" / "adapters")
    adapters = {f"base_model.model.{name}": tensor for name, tensor in state.items() if ".lora_" in name}
    assert adapters.keys() == {n for n in model.state_dict() if ".lora_" in n}
    assert all(tensor.abs().sum() > 0 for tensor in adapters.values())
    assert not model.load_state_dict(adapters, strict=False).unexpected_keys
    return model


@pytest.mark.parametrize("run", ["whole", "full"])
def test_a_whole_model_has_the_trained_logits(folder: Path, tmp_path: Path, trained: torch.Tensor, run: str) -> None:
    said = export(folder / "runs" / run, tmp_path / "out", "--shard-size", "20kB")
    assert f"from_pretrained('{tmp_path / 'out'}')" in said
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(model), trained)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert {path.name for path in files} == set(index["weight_map"].values())
    assert len(files) > 2
    sizes = [sum(t.nbytes for t in load_file(path).values()) for path in files]
    assert max(sizes) <= 20_000
    assert sum(sizes) == index["metadata"]["total_size"]
    assert "lm_head.weight" not in index["weight_map"], "tied weights are written once"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"], "nothing hidden is left"


def test_the_export_at_the_end_of_the_run_is_the_same(folder: Path, tmp_path: Path) -> None:
    export(folder / "runs" / "whole" / "last", tmp_path / "out")
    ours, runs = (load_file(f / "model.safetensors") for f in (tmp_path / "out", folder / "runs" / "whole" / "model"))
    assert ours.keys() == runs.keys()
    assert all(torch.equal(ours[name], runs[name]) for name in runs)


def test_weights_are_exported_in_the_requested_dtype(folder: Path, tmp_path: Path) -> None:
    export(folder / "runs" / "whole", tmp_path / "out", "--dtype", "bf16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = saved(folder / "runs" / "whole")
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(p, expected[name].bfloat16()) for name, p in model.named_parameters())


def test_adapters_of_two_ranks_load_in_peft(folder: Path, tmp_path: Path, adapted: Any) -> None:
    from peft import PeftModel

    said = export(folder / "runs" / "adapters", tmp_path / "out")
    assert "(adapter, " in said
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    found = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    assert torch.equal(logits(found), logits(adapted))
    assert found.peft_config["default"].base_model_name_or_path == str(folder / "model")


def test_merged_is_what_peft_merges(folder: Path, tmp_path: Path, adapted: Any) -> None:
    import copy

    export(folder / "runs" / "adapters", tmp_path / "out", "--as", "merged", "--shard-size", "20KB")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = copy.deepcopy(adapted).merge_and_unload().state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_near(found[name], tensor, within=1e-6)
    assert_near(logits(model), logits(adapted))


@pytest.mark.parametrize("form", ["hf", "adapter", "merged"])
def test_the_card_of_every_form_is_valid_and_its_code_runs(
    folder: Path, tmp_path: Path, trained: torch.Tensor, adapted: Any, form: str
) -> None:
    run = folder / "runs" / ("whole" if form == "hf" else "adapters")
    export(run, tmp_path / "out", "--as", form)
    for place in (tmp_path / "out", *([] if form == "merged" else [run / "model"])):
        found = card(place)
        assert found.data.library_name == ("peft" if form == "adapter" else "transformers")
        assert "the weights of step 2. Training started from `model`" in found.text
        assert "| train.jsonl | 32 | " in found.text
        assert "2 steps over 32 rows" in found.text
        losses = curve(read_metrics(run / "metrics.jsonl"), "loss")
        assert f"up to step 2 is {losses[-1][0]:.4f}" in found.text
        assert yaml.safe_load(found.text.split("```yaml")[1].split("```")[0])["optimizer"]["lr"] == 5e-2
        assert str(folder) not in found.text
        assert_near(logits(run_code(place)["model"]), trained if form == "hf" else logits(adapted))


def test_a_longer_run_keeps_the_card_that_was_edited(folder: Path, ranks: RankPool) -> None:
    model = folder / "runs" / "edited" / "model"
    for steps in (1, 2, 3):
        ranks.run(train, recipe(folder, name="edited", duration={"steps": steps}, schedule="constant"), world=1)
        if steps == 2:
            assert "the weights of step 2." in card(model).text, "a card as it was written is replaced"
            text = (model / "README.md").read_text().replace("# license: fill this in", "license: mit #")
            (model / "README.md").write_text(text)
    assert (model / "README.md").read_text() == text
    assert "the weights of step 3." in (model / "README.new.md").read_text()
    assert "was edited, so it stays" in (model.parent / "log.txt").read_text()


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_one_file_with_every_tensor(folder: Path, tmp_path: Path, adapted: Any, ending: str) -> None:
    path = tmp_path / f"state.{ending}"
    said = export(folder / "runs" / "adapters", path, "--as", "state")
    assert "1 file)" in said
    state = load_file(path) if ending == "safetensors" else torch.load(path, weights_only=True, mmap=True)
    expected = {n.removeprefix("base_model.model."): t for n, t in adapted.state_dict().items()}
    expected.pop("lm_head.weight")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_base_that_moved_is_named_and_another_one_is_refused(folder: Path, tmp_path: Path, adapted: Any) -> None:
    shutil.copytree(folder / "runs" / "adapters", tmp_path / "run", symlinks=True)
    state = (tmp_path / "run" / "last" / "state.json").resolve()
    gone = str(tmp_path / "gone")
    rewrite(state, state.read_text().replace(json.dumps(str(folder / "model")), json.dumps(gone)))
    said = export(tmp_path / "run", tmp_path / "out", "--as", "merged", code=2)
    assert f"model.path = '{gone}'" in said
    assert "--base PATH" in said
    export(tmp_path / "run", tmp_path / "out", "--as", "merged", "--base", folder / "model")
    assert_near(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(adapted))
    other = model_folder(tmp_path / "other", initializer_range=0.1)
    (tmp_path / ".export-wrong").mkdir()
    (tmp_path / ".export-wrong" / "left by an earlier export").touch()
    said = export(tmp_path / "run", tmp_path / "wrong", "--as", "merged", "--base", other, code=2)
    assert "trained on different weights" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out", "run"], "no half export is left"


@pytest.mark.parametrize(
    ("run", "out", "words", "message"),
    [
        ("whole", "out", ("--as", "adapter"), "trained without adapters (model.lora). Use --as hf."),
        ("whole", "out", ("--as", "merged"), "trained without adapters"),
        ("adapters", "out", ("--as", "hf"), "Use --as merged"),
        ("whole", "out", ("--as", "state"), "writes one file, with a name that ends in .safetensors"),
        ("whole", "out.pt", ("--as", "hf"), "writes a folder"),
        ("whole", "out", ("--as", "gguf"), "allowed are hf, adapter, merged, state"),
        ("whole", "out", ("--dtype", "bf6"), "allowed are fp32, bf16, fp16, original (did you mean 'bf16'?)"),
        ("whole", "out", ("--shard-size", "5XB"), "is not a size"),
        ("whole", "full", (), "exists and is not empty"),
        ("nowhere", "out", (), "no such folder"),
        ("whole", "s3://bucket/out", (), "local path"),
    ],
)
def test_mistakes_are_user_errors(
    folder: Path, tmp_path: Path, run: str, out: str, words: tuple[str, ...], message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    said = export(folder / "runs" / run, out if "://" in out else tmp_path / out, *words, code=2)
    assert message in said
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*"))] == ["full", "full/thesis.txt"]


def test_a_damaged_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "runs" / "whole", tmp_path / "run", symlinks=True)
    file = next((tmp_path / "run" / "last").resolve().glob("__1_*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert f"is damaged: {file} was changed" in export(tmp_path / "run", tmp_path / "out", code=2)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_code_of_a_model_runs_only_when_allowed(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "runs" / "whole", tmp_path / "run", symlinks=True)
    path = (tmp_path / "run" / "last" / "state.json").resolve()
    state = json.loads(path.read_text())
    state["recipe"]["model"]["trust_remote_code"] = True
    rewrite(path, json.dumps(state))
    assert "--trust-remote-code" in export(tmp_path / "run", tmp_path / "out", code=2)
    export(tmp_path / "run", tmp_path / "out", "--trust-remote-code")
