"""One JSON of TrainingArguments, read by Transformers' own parser and by `fullshard train`: the same losses, gradient
norms and learning rates. fullshard runs on two CPU ranks, as a file of accelerate says, started by itself or by
`accelerate launch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, HfArgumentParser, TrainingArguments

from tests.parity.test_hf_trainer import InOrder, collate
from tests.small import curve, model_folder, token_file

ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_activation_checkpointing": True},
}
OURS = ("data.shuffle=false", "topology.device=cpu", "log.every_steps=1", "log.sinks=[]", "evaluate.parts=[]")
STEPS = 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=40)
    arguments = {
        "output_dir": str(path / "out"),
        "model_name_or_path": str(path / "model"),
        "train_file": str(path / "train.jsonl"),
        "max_length": 48,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 2.5,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    (path / "arguments.json").write_text(json.dumps(arguments))
    (path / "accelerate.yaml").write_text(yaml.safe_dump(ACCELERATE))
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[float, float, float]]:
    """What Trainer does with the file: one process, and two micro-batches a step for the two ranks."""
    [arguments] = HfArgumentParser(TrainingArguments).parse_json_file(  # type: ignore[arg-type]
        str(folder / "arguments.json"), allow_extra_keys=True
    )
    arguments.gradient_accumulation_steps = 2
    arguments.output_dir = str(folder / "hf")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    trainer = InOrder(model=model, args=arguments, train_dataset=rows, data_collator=collate)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [(entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in logged]


LAUNCH = {
    "by itself": (["-m", "fullshard", "train"], ["--config-file", "accelerate.yaml"]),
    "by accelerate": (
        ["-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "-m", "fullshard", "train"],
        [],
    ),
}


@pytest.mark.parametrize("how", ["by itself", pytest.param("by accelerate", marks=pytest.mark.slow)])
def test_the_same_file_gives_the_same_training(folder: Path, expected: list[Any], how: str) -> None:
    before, after = LAUNCH[how]
    name = how.replace(" ", "-")
    command = [sys.executable, *before, "arguments.json", *after, *OURS, f"name={name}", f"data.cache={folder / 'c'}"]
    environ = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    found = torch.tensor(curve(records, "loss", "grad_norm", "lr"), dtype=torch.float64)
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert found.shape == (STEPS, 3)
    # Not 1e-6: over the steps AdamW enlarges the rounding of two programs that add up losses in another order.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    resolved = yaml.safe_load((folder / name / "recipe.resolved.yaml").read_text())
    assert (resolved["sharding"]["strategy"], resolved["sharding"]["activation_checkpointing"]) == ("grad_op", "full")
    assert "arguments.json is read as a file of the HF Trainer" in done.stdout
    assert "left out, and in force as the HF Trainer does it: " in done.stdout
    assert done.stdout.count("sharding.activation_checkpointing: full (") == 1
