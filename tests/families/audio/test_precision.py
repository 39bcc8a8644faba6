"""A LoRA fine-tune of an audio language model on a card without bf16: each failure on the way there, provoked with
plain PyTorch, and beside it the same job as it trains here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMultimodalLM

import fullshard
from fullshard.dist.precision import resolve_for
from fullshard.errors import RecipeError, SetupError
from fullshard.explain.match import explain
from tests.families.audio.small import loaded, model_folder, processed, settings, write_records
from tests.ranks import RankPool
from tests.small import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in fp32, and the same with another dtype fixed in its files."""
    path = tmp_path_factory.mktemp("precision")
    model_folder(path / "model", "phi4_multimodal")
    for word, dtype in {"fp16": torch.float16, "bf16": torch.bfloat16}.items():
        (path / word).mkdir()
        for file in (path / "model").glob("*.j*"):
            (path / word / file.name).write_bytes(file.read_bytes())
        AutoModelForMultimodalLM.from_pretrained(path / "model", dtype=dtype).save_pretrained(path / word)
    write_records(path, [1, 1, 0, 1, 1, 1, 0, 1])
    return path


def plain_step(folder: Path, model: Any) -> None:
    """One step as it is usually written: scale, backward, unscale, clip, step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, scaler = torch.optim.AdamW(trained, lr=1e-2), torch.amp.GradScaler("cpu")
    row = processed(folder, json.loads((folder / "chats.jsonl").read_text().splitlines()[0]))
    labels = row.pop("labels")
    logits = model(**row).logits[0, :-1]
    scaler.scale(cross_entropy(logits.float(), labels[0, 1:])).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    scaler.step(optimizer)


def adapted(folder: Path, word: str, dtype: torch.dtype) -> Any:
    model = AutoModelForMultimodalLM.from_pretrained(folder / word, dtype=dtype)
    config = LoraConfig(r=4, target_modules=["qkv_proj"])
    return get_peft_model(model, config, autocast_adapter_dtype=dtype == torch.float32)


def test_plain_a_scaler_refuses_adapters_in_fp16(folder: Path) -> None:
    """It is the dtype of the weights that are trained, not a missing flag."""
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
        plain_step(folder, adapted(folder, "fp16", torch.float16))
    plain_step(folder, adapted(folder, "fp16", torch.float32))


def test_plain_adapters_that_were_never_added_train_nothing(folder: Path) -> None:
    """A LoraConfig alone changes no model: with its base frozen nothing is left to train."""
    model = loaded(folder / "model").requires_grad_(False)
    LoraConfig(r=64, target_modules=["qkv_proj"])
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        plain_step(folder, model)


def test_plain_a_model_spread_by_device_map_cannot_be_sharded() -> None:
    model = torch.nn.Linear(2, 2)
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}  # type: ignore[assignment]
    try:
        accelerator = Accelerator(cpu=True)
        accelerator.state.distributed_type = "MULTI_CPU"  # type: ignore[assignment]
        with pytest.raises(ValueError, match="device_map='auto'"):
            accelerator.prepare_model(model)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("stored", "precision"), [("fp16", "fp16"), ("bf16", "fp16"), pytest.param("fp16", "bf16", marks=pytest.mark.slow)]
)
def test_here_adapters_train_whatever_the_files_hold(
    ranks: RankPool, folder: Path, stored: str, precision: str
) -> None:
    name = f"{stored}-{precision}"
    model = {"path": str(folder / stored), "lora": "paper_r64"}
    chosen = settings(
        folder,
        name,
        model=model,
        optimizer={"lr": 2e-3},
        duration={"steps": 4},
        sharding={"activation_checkpointing": "full"},
    ) | {"precision": precision}
    records = [record for record in ranks.run(train, chosen, world=2)[0] if record["kind"] == "train"]
    losses = [record["loss"] for record in records]
    assert losses[-1] < 0.9 * losses[0], losses
    assert [record.get("skipped_steps") for record in records] == [0 if precision == "fp16" else None] * 4
    assert ("loss_scale" in records[0]) == (precision == "fp16")
    log = (folder / "runs" / name / "log.txt").read_text()
    assert "First update proven" in log


def test_here_bf16_never_has_a_scaler() -> None:
    """Elsewhere a scaler with gradients in bf16 fails at the first unscaling on a GPU."""
    found = resolve_for("auto", capability=(8, 0), name="A100")
    assert (found.compute, found.storage, found.scaler) == (torch.bfloat16, torch.float32, False)
    said = "NotImplementedError: \"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
    assert [match.entry.name for match in explain(said)][0] == "unscale-bf16"


def test_here_a_model_with_nothing_to_train_is_refused(ranks: RankPool, folder: Path) -> None:
    towers = {name: {"freeze": True} for name in ("language", "audio", "projector")}
    with pytest.raises(AssertionError, match="The model has no trainable parameter"):
        ranks.run(train, settings(folder, "nothing", model={"towers": towers}), world=1)


def test_here_a_device_map_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"model\.device_map"):
        fullshard.read({"model": {"kind": "audio_lm", "path": "m", "device_map": "auto"}, "data": {"train": "t.jsonl"}})


def test_here_a_card_without_bf16_computes_in_fp16_and_says_so() -> None:
    found = resolve_for("auto", capability=(7, 5), name="TITAN RTX")
    assert (found.compute, found.storage, found.scaler) == (torch.float16, torch.float32, True)
    assert found.switched() == "precision = auto became fp16 with a loss scaler: bf16 needs compute capability 8.0."
    with pytest.raises(SetupError, match="TITAN RTX has compute capability 7.5, and bf16 needs 8.0"):
        resolve_for("bf16", capability=(7, 5), name="TITAN RTX")
