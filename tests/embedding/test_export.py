"""What a run leaves: a folder that sentence-transformers loads, and that encodes as the trained model does.

The trained vectors are made without it, from the tensors of the checkpoint, Transformers, and pooling written out here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize
from typer.testing import CliRunner

from fullshard.checkpoint.reader import open_tensors
from fullshard.cli import app
from tests.embedding import texts
from tests.ranks import RankPool
from tests.small import curve, train

TEXTS = ["ban", "kis kit kis dot lux mem", "bar bas dor", "luk " * 11]
PROMPTS = {"query": "query : ", "document": "doc : "}
POOL = {"mean": lambda hidden: hidden.mean(0), "cls": lambda hidden: hidden[0], "last": lambda hidden: hidden[-1]}
SHORT: dict[str, Any] = {"duration": {"steps": 2}, "optimizer": {"lr": 2e-2}, "batch": {"per_device": 4}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    texts.encoder(path / "bert", num_hidden_layers=1)
    for side in ("left", "right"):
        texts.decoder(path / f"qwen-{side}", padding_side=side, num_hidden_layers=1)
    texts.pairs(path / "train.jsonl")
    return path


def run(ranks: RankPool, folder: Path, name: str, start: str, *, world: int = 1, **sections: Any) -> Path:
    """A run of two steps; gives its folder."""
    settings = {"path": str(folder / start), **sections.pop("model", {})}
    ranks.run(train, texts.recipe(folder, name=name, model=settings, **SHORT | sections), world=world)
    return folder / "runs" / name


@torch.no_grad()
def vectors(model: Any, tokenizer: Any, pooling: str, *, prompt: str = "", unit: bool = True) -> torch.Tensor:
    """One text at a time, so that nothing is padded."""
    model.eval()
    rows = [tokenizer(prompt + text)["input_ids"] for text in TEXTS]
    found = [POOL[pooling](model(input_ids=torch.tensor([row])).last_hidden_state[0]) for row in rows]
    return normalize(torch.stack(found), dim=-1) if unit else torch.stack(found)


def trained(run: Path, start: Path) -> Any:
    """The backbone by Transformers, with the tensors of the last checkpoint."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(start)
    saved = open_tensors(run / "last").section("model")
    found = {name: saved.whole(name) for name in saved.names() if not name.startswith("learned_by_objective")}
    left = model.load_state_dict(found, strict=False)
    assert left.unexpected_keys == []
    assert all(name.startswith("pooler.") for name in left.missing_keys), left.missing_keys
    return model


def load(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def encoded(folder: Path, **settings: Any) -> torch.Tensor:
    """All texts at once, padded as the exported tokenizer does it."""
    return load(folder).encode(TEXTS, convert_to_tensor=True, **settings)  # type: ignore[no-any-return]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def export(*words: Any) -> None:
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("model", "pooling", "ends"),
    [
        ("bert", "mean", True),
        ("bert", "cls", True),
        ("bert", "last", True),
        ("qwen-left", "last", False),
        ("qwen-left", "mean", False),
        ("qwen-right", "last", False),
    ],
)
def test_encodes_as_trained(ranks: RankPool, folder: Path, model: str, pooling: str, ends: bool) -> None:
    out = run(ranks, folder, f"{model}-{pooling}", model, world=2 if pooling == "mean" else 1, model={"pooling": pooling})
    expected = vectors(trained(out, folder / model), texts.tokenizer(ends=ends), pooling)
    assert not torch.allclose(expected, vectors(untrained(folder / model), texts.tokenizer(ends=ends), pooling), atol=1e-2)
    assert_near(encoded(out / "model"), expected)


def untrained(folder: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder)


@pytest.fixture(scope="module")
def prompted(ranks: RankPool, folder: Path) -> Path:
    """Prompts, and a learned temperature; on two ranks."""
    data = {"encode": {"kind": "pairs", "prompts": PROMPTS}}
    objective = {"loss": {"kind": "infonce", "learn_temperature": True}}
    return run(ranks, folder, "prompted", "bert", world=2, data=data, objective=objective)


def test_prompts_of_the_run_are_those_of_the_model(folder: Path, prompted: Path) -> None:
    model = trained(prompted, folder / "bert")
    for name, prompt in PROMPTS.items():
        expected = vectors(model, texts.tokenizer(), "mean", prompt=prompt)
        assert_near(encoded(prompted / "model", prompt_name=name), expected)
    assert_near(encoded(prompted / "model"), vectors(model, texts.tokenizer(), "mean"))


def test_a_checkpoint_is_exported_with_prompts_and_without_the_temperature(
    folder: Path, prompted: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file
    from transformers import BertModel

    saved = open_tensors(prompted / "last").section("model")
    assert "learned_by_objective.moved" in saved.names()
    export(prompted, tmp_path / "out")
    expected = vectors(trained(prompted, folder / "bert"), texts.tokenizer(), "mean", prompt=PROMPTS["query"])
    assert_near(encoded(tmp_path / "out", prompt_name="query"), expected)
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert names == set(BertModel.from_pretrained(folder / "bert").state_dict())
    export(prompted, tmp_path / "all.safetensors", "--as", "state")
    assert set(load_file(tmp_path / "all.safetensors")) == names


@pytest.fixture(scope="module")
def adapted(ranks: RankPool, folder: Path) -> Path:
    data = {"encode": {"kind": "pairs", "prompts": PROMPTS}}
    model = {"lora": {"r": 3, "alpha": 9}, "pooling": "cls", "normalize": False}
    objective = {"loss": {"kind": "sigmoid"}}
    return run(ranks, folder, "adapted", "bert", world=2, data=data, model=model, objective=objective)


@pytest.fixture(scope="module")
def by_peft(folder: Path, adapted: Path) -> dict[str, torch.Tensor]:
    """Vectors of the adapted model by peft alone, for each prompt."""
    from peft import LoraConfig, get_peft_model

    targets = r"encoder\..*(query|key|value|dense)"
    model = get_peft_model(untrained(folder / "bert"), LoraConfig(r=3, lora_alpha=9, target_modules=targets))
    saved = open_tensors(adapted / "last").section("model")
    names = {name for name in saved.names() if ".lora_" in name}
    left = model.base_model.model.load_state_dict({name: saved.whole(name) for name in names}, strict=False)
    assert left.unexpected_keys == []
    assert [name for name in left.missing_keys if ".lora_" in name] == []
    prompts = {"none": "", **PROMPTS}
    return {n: vectors(model, texts.tokenizer(), "cls", prompt=p, unit=False) for n, p in prompts.items()}


@pytest.mark.parametrize("form", ["at the end", "adapter", "merged"])
def test_adapters(adapted: Path, by_peft: dict[str, torch.Tensor], tmp_path: Path, form: str) -> None:
    out = adapted / "model"
    if form != "at the end":
        out = tmp_path / "out"
        export(adapted, out, "--as", form)
    assert (out / "adapter_config.json").is_file() == (form != "merged")
    assert_near(encoded(out), by_peft["none"])
    assert_near(encoded(out, prompt_name="query"), by_peft["query"])
    assert_near(encoded(out, prompt_name="document"), by_peft["document"])
    assert by_peft["none"].norm(dim=-1).max() > 1.1, "not normalised"
