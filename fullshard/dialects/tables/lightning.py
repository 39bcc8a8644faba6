"""Lightning's Trainer and Fabric: the keys of a LightningCLI file's `trainer` section."""

from __future__ import annotations

from typing import Any

from fullshard.dialects import trainer_arguments
from fullshard.dialects.kinds import (
    ANY_WHOLE,
    DEVICES,
    LIST,
    NOT_NEGATIVE,
    POSITIVE,
    SECTION,
    SWITCH,
    TEXT,
    WHOLE,
    Kind,
    one_of,
)
from fullshard.dialects.rows import (
    Dialect,
    File,
    Outcome,
    Settings,
    ignored,
    part_of,
    reads,
    refuse,
    refused,
    to,
    unused,
)
from fullshard.dialects.words import our_word
from fullshard.formatting.yaml_text import shown


def _strategy(value: Any, file: File) -> Outcome | Settings:
    name = TEXT.read(value.get("class_path")) if isinstance(value, dict) else value
    arguments = SECTION.read(value.get("init_args", {})) if isinstance(value, dict) else {}
    short = name.rpartition(".")[2].lower().removesuffix("strategy")
    if short in ("auto", "single_device", "ddp_spawn", "ddp_notebook", ""):
        return ignored("") if short != "ddp_spawn" else {"sharding.strategy": "none"}
    kind = our_word("sharding.strategy", short)
    if kind is None:
        return refused(f"{name} is not available: fsdp, ddp, deepspeed_stage_2 and deepspeed_stage_3 are")
    sharding = arguments.get("sharding_strategy")
    if sharding and our_word("sharding.strategy", sharding) is None:
        return refused(f"{sharding} is not a strategy. Known: FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD")
    settings: Settings = {"sharding.strategy": our_word("sharding.strategy", sharding) if sharding else kind}
    if SWITCH.read(arguments.get("cpu_offload", False)):
        settings["sharding.cpu_offload"] = True
    if arguments.get("activation_checkpointing_policy"):
        settings["sharding.activation_checkpointing"] = "full"
    if arguments.get("state_dict_type"):
        settings["checkpoint.format"] = arguments["state_dict_type"]
    return settings


def _schedule(value: Any, file: File) -> Outcome | Settings:
    return trainer_arguments.schedule(value.rpartition(".")[2], file)


def _devices(value: Any, file: File) -> Outcome | Settings:
    return ignored("") if value in ("auto", "-1") else {"topology.devices": value}


def _logger(value: Any, file: File) -> Outcome | Settings:
    if isinstance(value, bool):
        return {"log.sinks": ["tensorboard"] if value else []}
    entries = value if isinstance(value, list) else [value]
    paths = [shown(entry.get("class_path", "") if isinstance(entry, dict) else entry) for entry in entries]
    names = [path.rpartition(".")[2] for path in paths]
    known = {"TensorBoardLogger": "tensorboard", "WandbLogger": "wandb"}
    unknown = [name for name in names if name not in known]
    if unknown:
        return ignored(f"{unknown[0]} is not available: metrics.jsonl in the run folder has every number")
    return {"log.sinks": [known[name] for name in names]}


def _clip(value: Any, file: File) -> Outcome | Settings:
    if file.get("trainer.gradient_clip_algorithm", "norm") != "norm":
        return refused("gradients are clipped by their global norm, not by value: leave gradient_clip_algorithm out")
    return trainer_arguments.clip(value, file)


def _interval(value: Any, file: File) -> Outcome | Settings:
    if isinstance(value, float) and value <= 1:
        return (
            {"evaluate.every_epochs": 1}
            if value == 1.0
            else refused("a share of an epoch is not an interval: write evaluate.every_steps")
        )
    return {"evaluate.every_steps": value}


def _seed(value: Any, file: File) -> Outcome | Settings:
    return ignored("") if isinstance(value, bool) else {"seed": value}


_SEED = Kind(("true or false",), (lambda value: value if isinstance(value, bool) else None,)) | WHOLE
_CODE = "its class is your code: write it as a part of fullshard (docs/own-parts.md), or keep your own loop"

DIALECT = Dialect(
    name="Lightning",
    title="Lightning",
    intro=(
        "The `trainer` section of a LightningCLI file. Model and data are classes of yours there; name a model "
        "and data\n"
        "of fullshard, or keep your own loop and use `fullshard.shard`."
    ),
    marks=(
        "trainer",
        "seed_everything",
        "trainer.max_epochs",
        "trainer.accelerator",
        "trainer.devices",
        "trainer.strategy",
    ),
    sections=("trainer", "fit"),
    rows=(
        to("duration.epochs", "max_epochs"),
        reads("duration.steps", trainer_arguments.steps, "max_steps", takes=ANY_WHOLE, note="-1: not set"),
        reads(
            "topology.devices",
            _devices,
            "devices",
            takes=one_of("auto", "-1") | DEVICES,
            note="a count or a list of ids",
        ),
        to("topology.nodes", "num_nodes"),
        to("topology.device", "accelerator", note="gpu is cuda"),
        reads(
            "sharding.strategy",
            _strategy,
            "strategy",
            takes=TEXT | SECTION,
            note="fsdp, ddp, deepspeed_stage_3, or FSDPStrategy with its arguments",
        ),
        to("precision", "precision", note="bf16-mixed, 16-mixed, 32-true and others"),
        to("batch.accumulate", "accumulate_grad_batches"),
        reads(
            "optimizer.clip", _clip, "gradient_clip_val", takes=NOT_NEGATIVE, default=0, note="left out: no clipping"
        ),
        part_of("gradient_clip_algorithm", "gradient_clip_val", takes=TEXT),
        reads("evaluate.every_steps", _interval, "val_check_interval", takes=POSITIVE),
        to("evaluate.every_epochs", "check_val_every_n_epoch"),
        to("log.every_steps", "log_every_n_steps"),
        reads("log.sinks", _logger, "logger", takes=SWITCH | TEXT | LIST | SECTION),
        to("output", "default_root_dir"),
        to("sharding.sync_batchnorm", "sync_batchnorm"),
        reads("seed", _seed, "seed_everything", takes=_SEED),
        to("batch.per_device", "data.batch_size data.init_args.batch_size"),
        to("data.workers", "data.num_workers data.init_args.num_workers"),
        to(
            "optimizer.lr",
            "model.lr model.learning_rate model.init_args.lr model.init_args.learning_rate optimizer.init_args.lr",
        ),
        to(
            "optimizer.weight_decay", "model.weight_decay model.init_args.weight_decay optimizer.init_args.weight_decay"
        ),
        refuse("model.class_path data.class_path", _CODE, unless=()),
        unused(
            "callbacks plugins",
            "checkpoints, bars, early stopping and timers are settings: checkpoint, evaluate, log",
            quiet=([],),
        ),
        unused(
            "enable_checkpointing enable_progress_bar enable_model_summary deterministic benchmark "
            "inference_mode use_distributed_sampler detect_anomaly barebones reload_dataloaders_every_n_epochs "
            "num_sanity_val_steps profiler limit_test_batches limit_predict_batches ckpt_path",
            "fullshard check and --dry-run try a run; checkpoints and bars are always there",
            quiet=(True, False, 2, 0, 1.0),
        ),
        refuse(
            "fast_dev_run overfit_batches limit_train_batches",
            "write duration.steps; fullshard check and --dry-run try a run",
            unless=(False, 0, 1.0),
        ),
        unused("limit_val_batches", "validation reads all of its data", quiet=(1.0,)),
        refuse("min_epochs min_steps max_time", "write duration.epochs or duration.steps", unless=(0,)),
        reads("optimizer.kind", trainer_arguments.optimizer, "optimizer.class_path"),
        reads("schedule.kind", _schedule, "lr_scheduler.class_path"),
    ),
)
