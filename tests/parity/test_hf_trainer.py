"""The same model, data order and hyper-parameters give the losses, gradient norms and final weights of HF Trainer.

The reference runs in this process on one CPU; fullshard runs on one rank and on two. What makes the two runs the same
run is said where it is set, and nothing of Trainer's arithmetic is replaced: only its sampler (the order of the file).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file, train

RECORDS, EPOCHS, GLOBAL, LR, DECAY = 90, 2, 8, 5e-3, 0.1
STEPS = 24  # 12 an epoch: the last window of each holds 2 records
LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "targets": "all-linear"}
# Amid the norms of each run. Were every step clipped, Adam, which no common factor moves, would hide a wrong ceiling.
CLIP_FULL, CLIP_LORA = 2.5, 1.0
TOLERANCE = 1e-5

Curve = list[tuple[float, float, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=RECORDS)
    return path


def settings(folder: Path, *, name: str, world: int, clip: float, **sections: Any) -> dict[str, Any]:
    """The same run for fullshard; two micro-batches a step on any number of ranks."""
    return recipe(
        folder,
        name=name,
        batch={"per_device": GLOBAL // 2 // world, "global": GLOBAL},
        duration={"epochs": EPOCHS, "steps": None},
        optimizer={"lr": LR, "weight_decay": DECAY, "betas": [0.9, 0.95], "clip": clip},
        schedule={"kind": "linear", "warmup": 0},
        **sections,
    )


class InOrder(Trainer):  # type: ignore[misc]
    """HF Trainer that reads the data in the order of the file."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def collate(records: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(record["input_ids"]) for record in records)
    ids = torch.zeros(len(records), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, record in enumerate(records):
        ids[row, : len(record["input_ids"])] = torch.tensor(record["input_ids"])
        mask[row, : len(record["input_ids"])] = 1
    labels = ids.masked_fill(mask == 0, -100)
    # The first token of a row is never predicted. With this the token count that Trainer divides by is that of the
    # loss terms, also in versions that count before the labels are shifted.
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def hf_trainer(model: torch.nn.Module, folder: Path, output: Path, *, clip: float) -> Curve:
    """Loss, gradient norm and learning rate of each of Trainer's steps."""
    arguments = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=GLOBAL // 2,
        gradient_accumulation_steps=2,
        num_train_epochs=EPOCHS,
        learning_rate=LR,
        weight_decay=DECAY,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        max_grad_norm=clip,
        lr_scheduler_type="linear",
        warmup_steps=0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        average_tokens_across_devices=True,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    trainer = InOrder(model=model, args=arguments, train_dataset=rows, data_collator=collate)
    # Trainer decays by name (all but norms and biases), fullshard by shape (matrices): the same set on this model.
    by_shape = {name for name, parameter in model.named_parameters() if parameter.dim() >= 2}
    assert set(trainer.get_decay_parameter_names(model)) & dict(model.named_parameters()).keys() == by_shape
    trainer.train()
    assert trainer.state.global_step == STEPS
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [(entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in logged]


def compare(records: list[dict[str, Any]], expected: Curve, *, clip: float) -> None:
    found = torch.tensor(curve(records, "loss", "grad_norm", "lr"), dtype=torch.float64)
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert found.shape == (STEPS, 3)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=0)
    # It learns, and some steps are clipped and some are not: else equal numbers would show little.
    assert found[STEPS // 2 :, 0].mean() < 0.98 * found[: STEPS // 2, 0].mean()
    assert STEPS // 6 <= (found[:, 1] > clip).sum() <= STEPS - STEPS // 6


def compare_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        # Adam divides by the root of the squared gradient: rounding in a tiny gradient moves a weight by a share of lr.
        torch.testing.assert_close({name: tensor}, {name: expected[name]}, rtol=1e-4, atol=LR / 50)


@pytest.fixture(scope="module")
def full_reference(folder: Path) -> tuple[Curve, dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    losses = hf_trainer(model, folder, folder / "hf-full", clip=CLIP_FULL)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", [1, 2])
def test_full_training_equals_hf_trainer(
    ranks: RankPool,
    folder: Path,
    full_reference: tuple[Curve, dict[str, torch.Tensor]],
    world: int,
) -> None:
    name = f"full-{world}"
    records = ranks.run(train, settings(folder, name=name, world=world, clip=CLIP_FULL), world=world)[0]
    compare(records, full_reference[0], clip=CLIP_FULL)
    compare_weights(load_file(folder / "runs" / name / "model" / "model.safetensors"), full_reference[1])


@pytest.fixture(scope="module")
def fresh_adapter(ranks: RankPool, folder: Path) -> Path:
    """The adapter that a run starts from: what one step with a rate of 1e-30 exports."""
    one_step = {"duration": {"steps": 1}, "optimizer": {"lr": 1e-30, "weight_decay": 0.0}}
    ranks.run(train, recipe(folder, name="fresh", model={"lora": LORA}, **one_step), world=1)
    return folder / "runs" / "fresh" / "model"


@pytest.fixture(scope="module")
def lora_reference(folder: Path, fresh_adapter: Path) -> tuple[Curve, dict[str, torch.Tensor]]:
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, fresh_adapter, is_trainable=True)
    started = dict(model.named_parameters())
    assert all(p.abs().max() < 1e-29 for name, p in started.items() if "lora_B" in name)
    assert all(p.abs().max() > 1e-2 for name, p in started.items() if "lora_A" in name)
    losses = hf_trainer(model, folder, folder / "hf-lora", clip=CLIP_LORA)
    model.save_pretrained(folder / "hf-lora" / "adapter")
    return losses, load_file(folder / "hf-lora" / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("world", [1, 2])
def test_lora_equals_hf_trainer(
    ranks: RankPool,
    folder: Path,
    lora_reference: tuple[Curve, dict[str, torch.Tensor]],
    world: int,
) -> None:
    name = f"lora-{world}"
    asked = settings(folder, name=name, world=world, clip=CLIP_LORA, model={"lora": LORA})
    records = ranks.run(train, asked, world=world)[0]
    compare(records, lora_reference[0], clip=CLIP_LORA)
    compare_weights(load_file(folder / "runs" / name / "model" / "adapter_model.safetensors"), lora_reference[1])
