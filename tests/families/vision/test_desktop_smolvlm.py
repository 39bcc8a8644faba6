"""The recipe desktop-smolvlm: it parses with every strategy and format, and its miniature trains alike under each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast, SmolVLMConfig
from typer.testing import CliRunner, Result

import fullshard
from fullshard.cli import app
from fullshard.config.part import plain
from fullshard.families.vision.fresh_processor import fresh_processor
from fullshard.hf.tokenizers.tokenizer import TokenizerTraining, train_tokenizer
from tests.families.vision.small import model_folder, write_recordings
from tests.ranks import RankPool
from tests.small import curve, train

NAME = "desktop-smolvlm"
SIZE: dict[str, Any] = {
    "scale_factor": 3,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 64,
        "vocab_size": 49280,
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    },
}
FORMATS = {"full": "full", "grad_op": "sharded", "none": "sharded", "hybrid": "full"}
"""The format of checkpoints that is tried with each strategy."""


@pytest.mark.parametrize("strategy", FORMATS)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_the_recipe_as_shipped_takes_every_strategy_and_format(strategy: str, kind: str) -> None:
    recipe = fullshard.read(NAME, f"sharding.strategy={strategy}", f"checkpoint.format={kind}")
    assert (recipe.sharding.strategy, recipe.checkpoint.format) == (strategy, kind)


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_without_a_network_it_is_shown_and_says_what_to_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_recordings(tmp_path / "recordings.jsonl", episodes=1)
    assert "path: HuggingFaceTB/SmolVLM2-2.2B-Base" in ask("recipes", "show", NAME).stdout
    for words in (["train", NAME, "--dry-run"], ["check", NAME, "--quick", "--devices", "1"]):
        result = ask(*words)
        assert result.exit_code == 2
        assert "hf download HuggingFaceTB/SmolVLM2-2.2B-Base" in " ".join(result.output.split())


def test_a_model_of_its_size_dry_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config and processor in the real size, without weights."""
    monkeypatch.chdir(tmp_path)
    write_recordings(tmp_path / "recordings.jsonl", episodes=2)
    train_tokenizer(["screen key mouse " * 9], TokenizerTraining(vocab_size=300), folder=tmp_path / "words")
    config = SmolVLMConfig(**SIZE)
    processor = fresh_processor(config, PreTrainedTokenizerFast.from_pretrained(tmp_path / "words"))
    config.image_token_id = processor.image_token_id
    processor.save_pretrained(tmp_path / "model")
    config.save_pretrained(tmp_path / "model")
    result = ask("train", NAME, f"model.path={tmp_path}/model", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "do_image_splitting: false" in result.stdout
    assert "# encoder: desktop" in result.stdout


def test_its_miniature_trains_alike_under_every_strategy(ranks: RankPool, tmp_path: Path) -> None:
    model_folder(tmp_path / "model", "smolvlm")
    write_recordings(tmp_path / "recordings.jsonl", episodes=4)
    curves: dict[str, Any] = {}
    for strategy, kind in FORMATS.items():
        recipe = fullshard.read(
            NAME,
            f"name={strategy}",
            f"output={tmp_path}",
            f"model.path={tmp_path}/model",
            f"data.train={tmp_path}/recordings.jsonl",
            f"data.cache={tmp_path}/cache",
            "data.sequence_length=128",
            "data.holdout=0.25",
            "batch.per_device=2",
            "duration={steps: 2}",
            "precision=fp32",
            "topology.device=cpu",
            "log.every_steps=1",
            f"sharding.strategy={strategy}",
            f"checkpoint.format={kind}",
        )
        records = ranks.run(train, plain(recipe), world=2, nodes=2 if strategy == "hybrid" else 1)[0]
        curves[strategy] = curve(records, "loss", "grad_norm")
        found = next(record for record in records if record["kind"] == "validation")
        assert 0 <= found["actions"] <= 1
        names = {path.name for path in (tmp_path / strategy / "last").rglob("*") if path.is_file()}
        assert any(name.endswith(".distcp") for name in names) == (kind == "sharded"), names
    for strategy, found in curves.items():
        np.testing.assert_allclose(found, curves["full"], rtol=2e-6, err_msg=strategy)
    check_export(tmp_path)


def check_export(folder: Path) -> None:
    """Transformers loads the model with the event tokens, whose rows began as the mean of the others."""
    before, after = (AutoModelForImageTextToText.from_pretrained(folder / at) for at in ("model", "full/model"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "full/model")
    [start] = tokenizer("<EVENT_START>", add_special_tokens=False)["input_ids"]
    old, new = (model.get_input_embeddings().weight.detach() for model in (before, after))
    assert start >= len(old)
    assert len(new) >= len(tokenizer) > len(old)
    # Two steps of AdamW at a rate of 1e-5 or less move a weight by 2e-5 at most.
    np.testing.assert_allclose(new[len(old) :], old.mean(0).expand(len(new) - len(old), -1), rtol=0, atol=3e-5)
    made = after.generate(input_ids=torch.tensor([[start]]), max_new_tokens=2, do_sample=False)
    assert made.shape[1] <= 3
