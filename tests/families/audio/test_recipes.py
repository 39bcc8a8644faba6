"""The recipes of the family: `audio` learns what it promises, and `paper_r64` does the seed's job step by step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import Phi4MultimodalConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import fullshard
from fullshard.cli import app
from fullshard.config.part import plain
from fullshard.families.audio.fresh_processor import fresh_processor
from fullshard.families.audio.sources.sounds import Sounds
from fullshard.hf.tokenizers.tokenizer import TokenizerTraining, train_tokenizer
from fullshard.log.metrics import read as read_metrics
from tests.families.audio.readings import write_readings
from tests.families.audio.small import model_folder

MARGIN = 0.4
"""How far `audio` is above the baseline, at least."""
PAPER = "paper_r64"


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def baseline(train: Sounds, held_out: Sounds) -> float:
    """The share of right answers of always giving the most frequent answer to each question."""
    records = [list(map(source.open().__getitem__, range(source.records))) for source in (train, held_out)]
    questions = {record["prompt"] for record in records[0]}
    usual = {q: Counter(r["response"] for r in records[0] if r["prompt"] == q).most_common(1)[0][0] for q in questions}
    return float(np.mean([usual[record["prompt"]] == record["response"] for record in records[1]]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_audio_beats_the_most_frequent_answer(tmp_path: Path) -> None:
    dialled = ["data.train.digits=dialled", "data.validation.digits=dialled"]  # the same clips on every machine
    folders = [f"output={tmp_path}", f"data.cache={tmp_path}/cache"]
    recipe = fullshard.read("audio", *folders, "topology.device=cpu", *dialled)
    assert recipe.topology.devices == 2
    fullshard.train(recipe)
    found = [record for record in read_metrics(tmp_path / "audio" / "metrics.jsonl") if "answers" in record][-1]
    usual = baseline(recipe.data.train, recipe.data.validation)
    assert 0.2 < usual < 0.4
    assert found["answers"] >= usual + MARGIN
    # Its short answers are one word each: wrong words are wrong answers.
    assert found["wer"] <= 1 - (usual + MARGIN)


def test_paper_r64_states_what_the_seed_states() -> None:
    stated = plain(fullshard.read(PAPER))
    assert stated["model"]["path"] == "microsoft/Phi-4-multimodal-instruct"
    lora = {"r": 64, "alpha": 128, "dropout": 0.05}
    assert {key: stated["model"]["lora"][key] for key in lora} == lora
    assert (stated["batch"]["per_device"], stated["batch"]["accumulate"]) == (8, 8)
    assert (stated["duration"]["epochs"], stated["optimizer"]["lr"]) == (3, 2e-5)
    assert (stated["topology"]["devices"], stated["precision"]) == (1, "auto")
    assert stated["sharding"]["activation_checkpointing"] == "full"
    shown = ask("recipes", "list").stdout
    assert PAPER in shown
    assert "audio" in shown


def test_without_a_network_it_says_what_to_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = write_readings(tmp_path, 4)
    data = [f"data.train={file}", "data.validation=null"]
    for words in (["train", PAPER, "--dry-run", *data], ["check", PAPER, "--quick", *data]):
        result = ask(*words)
        assert result.exit_code == 2
        assert "hf download microsoft/Phi-4-multimodal-instruct" in " ".join(result.output.split())


def test_a_model_of_its_size_dry_runs_with_the_steps_of_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Config and processor in the real size, without weights; 2,500 records."""
    monkeypatch.chdir(tmp_path)
    train_tokenizer(["Rate the pronunciation " * 9], TokenizerTraining(vocab_size=300), folder=tmp_path / "words")
    config = Phi4MultimodalConfig()
    processor = fresh_processor(config, PreTrainedTokenizerFast.from_pretrained(tmp_path / "words"))
    config.audio_config.audio_token_id = processor.audio_token_id
    processor.save_pretrained(tmp_path / "model")
    config.save_pretrained(tmp_path / "model")
    result = ask(
        *("train", PAPER, "--dry-run", f"model.path={tmp_path}/model", "model.revision=null"),
        *(f"data.train={write_readings(tmp_path, 2500)}", "data.validation=null", "data.holdout=0"),
        *("evaluate.parts=[]", "checkpoint.best=null"),
    )
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "2,500 records gave 2,500 samples" in said
    assert "120 = 3 epochs x 40 per epoch (2,500 samples; the last step of an epoch has 4)" in said, result.stdout


@pytest.mark.slow
def test_the_miniature_of_paper_r64_trains_with_checkpoints_40_80_and_120(tmp_path: Path) -> None:
    """313 records in micro-batches of one: as many micro-batches as 2,500 records in those of eight."""
    model_folder(tmp_path / "model", "phi4_multimodal")
    recipe = fullshard.read(
        PAPER,
        f"output={tmp_path}",
        f"model.path={tmp_path}/model",
        "model.revision=null",
        f"data.train={write_readings(tmp_path, 313)}",
        f"data.validation={{kind: files, path: {write_readings(tmp_path / 'held', 4)}, split: null}}",
        f"data.cache={tmp_path}/cache",
        "data.workers=0",
        "batch.per_device=1",
        "optimizer.lr=1e-3",
        "evaluate.parts=[loss, {kind: pronunciation, only_at_end: true, tokens: 4}]",
        "topology.device=cpu",
        "precision=fp32",
    )
    result = fullshard.train(recipe)
    run = tmp_path / PAPER
    assert (result.step, result.stopped) == (120, "done")
    assert {f"checkpoint-{step}" for step in (40, 80, 120)} | {"logs", "model"} <= {p.name for p in run.iterdir()}
    said = (run / "log.txt").read_text()
    assert "120 = 3 epochs x 40 per epoch (313 samples; the last step of an epoch has 1)" in " ".join(said.split())
    assert "Training complete!" in said
    losses = [record["loss"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]
    assert losses[-1] < 0.9 * losses[0]  # adapters cannot change the head, which is random
    assert result.validation["loss"] > 0
    assert result.validation["unparsed"] == 4
    assert result.validation["transcript_per"] == 1
    assert (run / "model" / "adapter_model.safetensors").is_file()
