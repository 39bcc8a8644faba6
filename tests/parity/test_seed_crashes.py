"""Three crashes that users meet in half precision, each provoked with plain PyTorch, and beside it the same model as it
trains here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy, huber_loss
from transformers import AutoModelForCausalLM

from tests.dist.denoiser import CHANNELS, plain, sinusoid
from tests.ranks import RankPool
from tests.small import model_folder, recipe, token_file, train

DENOISERS, DENOISE = "tests.dist.denoiser.Denoisers", "tests.dist.denoiser.Denoise"
LORA: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.0, "targets": "all-linear"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("crashes")
    model_folder(path / "model")
    for word, dtype in {"fp16": torch.float16, "bf16": torch.bfloat16}.items():
        AutoModelForCausalLM.from_pretrained(path / "model", dtype=dtype).save_pretrained(path / word)
    token_file(path / "train.jsonl", records=90)
    return path


def trained(ranks: RankPool, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of a run on two ranks that learned something."""
    records = [record for record in ranks.run(train, settings, world=2)[0] if record["kind"] == "train"]
    losses = [record["loss"] for record in records]
    assert losses[-1] < 0.95 * losses[0], losses
    assert not any(record.get("skipped_steps") for record in records)
    return records


# A sinusoid in fp32 meets weights in half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["Half", "BFloat16"])
@pytest.mark.parametrize("name", ["embedder", "in_root", "in_blocks"])
def test_plain_a_timestep_meets_weights_in_half(name: str, dtype: torch.dtype) -> None:
    model = plain(name).to(dtype)
    x, t = torch.zeros(4, 6, CHANNELS, dtype=dtype), torch.tensor([1.0, 10.0, 100.0, 999.0])
    with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype, but got Float and (Half|BFloat16)"):
        model(x, t)


def test_plain_a_loss_in_fp32_meets_outputs_in_half() -> None:
    """What is left when inputs and sinusoid have been cast by hand: the target of the loss."""
    model: Any = plain("in_root").half()
    model.t_embedder.register_forward_pre_hook(lambda _, args: (args[0].half(),))
    predicted = model(torch.zeros(4, 6, CHANNELS).half(), torch.arange(4.0))
    with pytest.raises(RuntimeError, match="Found dtype Float but expected Half"):
        huber_loss(predicted, torch.zeros(4, 6, CHANNELS)).backward()


def test_plain_a_timestep_cast_by_hand_is_another_one() -> None:
    """The cast that silences the first error when it comes before the sinusoid."""
    model: Any = plain("embedder").bfloat16()
    model.t_embedder.mlp.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    with torch.no_grad():
        first, second = model.t_embedder(torch.tensor([996.0, 997.0]).bfloat16())
    assert torch.equal(first, second)
    assert not torch.equal(*sinusoid(torch.tensor([996.0, 997.0])))


@pytest.mark.parametrize("name", ["embedder", "in_root", "in_blocks"])
def test_here_timesteps_and_half_precision_go_together(ranks: RankPool, folder: Path, name: str) -> None:
    losses = {}
    for precision in ("fp32", "fp16", "bf16"):
        settings = recipe(
            folder,
            name=f"{name}-{precision}",
            precision=precision,
            objective={"kind": DENOISE},
            optimizer={"lr": 1e-2},
            duration={"steps": 12},
        )
        settings["model"] = {"kind": DENOISERS, "name": name}
        losses[precision] = [record["loss"] for record in trained(ranks, settings)]
    for precision, band in {"fp16": 2e-3, "bf16": 2e-2}.items():
        assert losses[precision] == pytest.approx(losses["fp32"], rel=band)
        assert losses[precision] != losses["fp32"]


# Adapters in fp32 beside a base in bf16


def flatten(path: str) -> None:
    """FSDP1 on a LoRA model, on this rank."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    dtypes = {p.dtype for p in model.parameters()}
    assert dtypes == {torch.bfloat16, torch.float32}
    expected = "Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32"
    with pytest.raises(ValueError, match=expected):
        FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def test_plain_flat_parameters_cannot_hold_adapters_beside_a_half_base(ranks: RankPool, folder: Path) -> None:
    ranks.run(flatten, str(folder / "bf16"), world=2)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_here_adapters_train_beside_a_half_base(ranks: RankPool, folder: Path, precision: str) -> None:
    model = {"path": str(folder / "bf16"), "lora": LORA}
    settings = recipe(
        folder,
        name=f"lora-{precision}",
        model=model,
        precision=precision,
        optimizer={"lr": 3e-2},
        duration={"steps": 12},
    )
    trained(ranks, settings)


# A scaler over fp16 weights


def step_with_scaler(path: Path, dtype: torch.dtype) -> tuple[float, float]:
    """One step as it is usually written: scale, backward, unscale, clip, step. The first weight before and after."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu")
    ids = torch.arange(3, 33)[None]
    logits = model(input_ids=ids).logits[0, :-1]
    scaler.scale(cross_entropy(logits.float(), ids[0, 1:])).backward()
    first = float(model.lm_head.weight.detach()[0, 0])
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    return first, float(model.lm_head.weight.detach()[0, 0])


def test_plain_a_scaler_refuses_fp16_weights(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
        step_with_scaler(folder / "fp16", torch.float16)
    before, after = step_with_scaler(folder / "fp16", torch.float32)
    assert before != after, "the same folder in fp32 is not refused: it is the weights, not a flag"


@pytest.mark.parametrize("clip", [1.0, None])
def test_here_a_scaler_goes_with_an_fp16_folder(ranks: RankPool, folder: Path, clip: float | None) -> None:
    settings = recipe(
        folder,
        name=f"scaler-{clip}",
        model={"path": str(folder / "fp16")},
        precision="fp16",
        optimizer={"clip": clip, "lr": 1e-2},
    )
    records = trained(ranks, settings)
    assert {record["loss_scale"] for record in records} == {65536.0}


def test_here_bf16_has_no_scaler_to_meet_its_gradients(ranks: RankPool, folder: Path) -> None:
    """On a GPU a scaler fails at bf16 gradients: "_amp_foreach_non_finite_check_and_unscale_cuda" is not implemented
    for them. A CPU unscales them without a word; other types show the same error there."""
    with pytest.raises(NotImplementedError, match='"_amp_foreach_non_finite_check_and_unscale_.*not implemented for'):
        torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(2).int()], torch.zeros(1), torch.ones(1))
    settings = recipe(folder, name="no-scaler", model={"path": str(folder / "bf16")}, precision="bf16")
    assert not any("loss_scale" in record for record in trained(ranks, settings))
