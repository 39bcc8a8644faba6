"""The settings of `accelerate launch` are in force where the recipe leaves a key open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fullshard.dialects.launch_variables import settings
from fullshard.recipes.read import read

FSDP: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
    "fsdp_config": {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_offload_params": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
        "fsdp_backward_prefetch": "BACKWARD_POST",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    },
}
TELL = """
import json, os, sys
from fullshard.commands.recipe_arguments import _starter
from fullshard.dialects.launch_variables import notes, settings
from fullshard.dist.env import detect
launch = detect(os.environ)
if launch.rank == 0:
    said = [*notes(launch.world), "again: " + " ".join(_starter())]
    print(json.dumps([launch.launcher, settings(os.environ).settings, said]))
"""


def launched(*options: str, home: Path) -> tuple[dict[str, Any], list[str]]:
    """What a script hears that the real `accelerate launch` starts with these options."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, "--no_python", sys.executable, "-c", TELL]
    environ = {
        k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "FSDP", "MASTER", "RANK", "WORLD"))
    }
    environ |= {"HF_HOME": str(home), "PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    launcher, found, notes = json.loads(done.stdout.strip().splitlines()[-1])
    assert launcher == "accelerate"
    return found, notes


@pytest.mark.parametrize("version", [1, 2])
def test_the_variables_of_a_file_say_what_the_file_says(tmp_path: Path, version: int) -> None:
    strategy = {1: {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, 2: {"fsdp_reshard_after_forward": False}}[version]
    section = {key: value for key, value in FSDP["fsdp_config"].items() if key != "fsdp_sharding_strategy"}
    if version == 2:
        section.pop("fsdp_backward_prefetch")
    file = tmp_path / "fsdp.yaml"
    file.write_text(yaml.safe_dump({**FSDP, "fsdp_config": {**section, "fsdp_version": version, **strategy}}))
    by_launcher, _ = launched("--config_file", str(file), home=tmp_path)
    by_file = read("quickstart", launch_file=str(file)).recipe
    assert by_launcher == {
        "precision": "bf16",
        "sharding.strategy": "grad_op",
        "sharding.cpu_offload": True,
        "sharding.activation_checkpointing": "full",
        "sharding.wrap.classes": ["Qwen3DecoderLayer"],
        "checkpoint.format": "full",
    }
    assert by_file.sharding.strategy == "grad_op"
    assert by_file.sharding.cpu_offload
    assert by_file.sharding.activation_checkpointing == "full"
    assert by_file.sharding.wrap is not None
    assert by_file.sharding.wrap.classes == ["Qwen3DecoderLayer"]
    assert by_file.checkpoint.format == "full"
    assert by_file.topology.devices == 2
    assert by_file.precision == "fp32"  # the recipe says so


def test_processes_that_accelerate_did_not_start_are_named(tmp_path: Path) -> None:
    found, notes = launched("--cpu", "--num_processes", "2", home=tmp_path)
    assert notes == [
        "accelerate was asked for 2 processes (--num_processes 2) and started one. To train on 2, leave accelerate "
        "out: fullshard train RECIPE --devices 2.",
        "again: torchrun --standalone --nproc-per-node 2 -m fullshard",
    ]
    assert found == {"topology.device": "cpu"}


def test_without_settings_nothing_is_said() -> None:
    nothing = settings({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"})
    assert nothing is not None
    assert nothing.said == ()
    # Without FSDP in use, its variables are another program's.
    assert settings({"FSDP_OFFLOAD_PARAMS": "true"}) is None
    foreign = settings({"ACCELERATE_MIXED_PRECISION": "no", "FSDP_OFFLOAD_PARAMS": "true"})
    assert foreign is not None
    assert foreign.settings == {}


@pytest.mark.parametrize(
    ("environ", "key", "value"),
    [
        ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, "sharding.strategy", "grad_op"),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "7"}, "sharding.wrap.min_params", 7),
        ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, "sharding.wrap.whole", True),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "sharding.compile", True),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "batch.accumulate", 4),
        ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "optimizer.clip", 0.5),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "sharding.strategy", "full"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"},
            "sharding.cpu_offload",
            True,
        ),
    ],
)
def test_a_variable_is_in_force_unless_the_recipe_says_otherwise(
    environ: dict[str, str], key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsdp = {} if "ACCELERATE_USE_DEEPSPEED" in environ else {"ACCELERATE_USE_FSDP": "true"}
    for name, word in {"ACCELERATE_MIXED_PRECISION": "no", **fsdp, **environ}.items():
        monkeypatch.setenv(name, word)
    found = settings(os.environ)
    assert found is not None
    assert found.settings[key] == value
    said = [line for line in read("quickstart").overridden if line.startswith(key) and "(accelerate launch)" in line]
    assert len(said) == 1
    if key == "batch.accumulate":
        assert "gives way to batch.global (recipe)" in said[0]
    elif value != 7:
        setting = {"sharding.strategy": "hybrid", "optimizer.clip": "2.0"}.get(key, "false")
        overridden = read("quickstart", f"{key}={setting}").overridden
        assert [line for line in overridden if "(command line) over" in line and "(accelerate launch)" in line]
