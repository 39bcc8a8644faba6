"""Settings of `accelerate launch` that are not in force are named, each with our key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fullshard.commands.arguments import to_overrides
from fullshard.dialects.accelerate import notes

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
from fullshard.dialects.accelerate import notes
from fullshard.dist.env import detect
launch = detect(os.environ)
if launch.rank == 0:
    print(json.dumps([launch.launcher, notes(os.environ, world=launch.world)]))
"""


def launched(*options: str, home: Path) -> list[str]:
    """What a script hears that the real `accelerate launch` starts with these options."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, "--no_python", sys.executable, "-c", TELL]
    environ = {
        k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "FSDP", "MASTER", "RANK", "WORLD"))
    }
    environ |= {"HF_HOME": str(home), "PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    launcher, found = json.loads(done.stdout.strip().splitlines()[-1])
    assert launcher == "accelerate"
    return list(found)


def test_an_fsdp_file_is_ignored_setting_by_setting(tmp_path: Path) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(yaml.safe_dump(FSDP))
    assert launched("--config_file", str(file), home=tmp_path) == [
        "accelerate's FSDP_TRANSFORMER_CLS_TO_WRAP=Qwen3DecoderLayer is ignored. "
        "Write sharding.wrap=[Qwen3DecoderLayer].",
        "accelerate's ACCELERATE_MIXED_PRECISION=bf16 is ignored. Write precision=bf16.",
        "accelerate's FSDP_SHARDING_STRATEGY=FULL_SHARD is ignored. Write sharding.strategy=full.",
        "accelerate's FSDP_OFFLOAD_PARAMS=true is ignored. Write sharding.cpu_offload=true.",
        "accelerate's FSDP_ACTIVATION_CHECKPOINTING=true is ignored. Write sharding.activation_checkpointing=full.",
        "accelerate's FSDP_STATE_DICT_TYPE=FULL_STATE_DICT is ignored. Write checkpoint.format=full.",
        "accelerate's FSDP_VERSION=1 is ignored: fullshard always uses FSDP2.",
        "accelerate's FSDP_BACKWARD_PREFETCH=BACKWARD_POST is ignored: FSDP2 always gathers the next block early, as "
        "BACKWARD_PRE did.",
    ]


def test_processes_that_accelerate_did_not_start_are_named(tmp_path: Path) -> None:
    assert launched("--cpu", "--num_processes", "2", home=tmp_path) == [
        "accelerate was asked for 2 processes (--num_processes 2) and started one. To train on 2, leave accelerate "
        "out: fullshard train RECIPE --devices 2.",
        "accelerate's ACCELERATE_USE_CPU=True is ignored. Write topology.device=cpu.",
    ]


def test_without_settings_there_are_no_notes() -> None:
    assert notes({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}, world=1) == []
    # Without FSDP in use, its variables are another program's.
    assert notes({"FSDP_OFFLOAD_PARAMS": "true"}, world=1) == []


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, "sharding.strategy=grad_op"),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "7"}, "sharding.wrap.min_params=7"),
        ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, "sharding.wrap.whole=true"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "sharding.compile=true"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "batch.accumulate=4"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "optimizer.clip=0.5"),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "sharding.strategy=full"),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, "sharding.cpu_offload=true"),
    ],
)
def test_the_words_to_write_are_settings_of_ours(environ: dict[str, str], key: str) -> None:
    from fullshard.recipes.read import read_recipe

    [line] = notes({"ACCELERATE_USE_FSDP": "true", **environ}, world=1)
    assert line.endswith(f" is ignored. Write {key}.")
    read_recipe("quickstart", *to_overrides([key], sections=[key.partition(".")[0]], options=()))
