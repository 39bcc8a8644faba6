"""A `config.yaml` with training stages: `training_stages.<stage>` with model, training, distributed, logging, wandb."""

from __future__ import annotations

import re
from typing import Any

from fullshard.dialects import trainer_arguments
from fullshard.dialects.kinds import AUTO, DEVICES, NOT_NEGATIVE, SECTION, SWITCH, TEXT
from fullshard.dialects.rows import (
    Dialect,
    File,
    Outcome,
    Settings,
    ignored,
    kind_of,
    part_of,
    reads,
    refuse,
    refused,
    to,
    unused,
)
from fullshard.dialects.words import our_word
from fullshard.errors import RecipeError
from fullshard.formatting.yaml_text import shown

_FSDP_OFF = "fsdp.enabled is off"


def _strategy(value: Any, file: File) -> Outcome | Settings:
    """`auto` and `fsdp` leave it to the fsdp section, which says which strategy."""
    word = value.lower()
    if word == "ddp":
        return {"sharding.strategy": "none"}
    if word == "fsdp":
        named = file.get("distributed.fsdp.sharding_strategy")
        return ignored("") if named else {"sharding.strategy": "full"}
    if word == "deepspeed":
        return refused("say the ZeRO stage: zero2 is sharding.strategy: grad_op, zero3 is full")
    return ignored("") if _enabled(file) or word == "auto" else refused(f"{value} is not known: auto, fsdp or ddp")


def _enabled(file: File) -> bool:
    return bool(file.get("distributed.fsdp.enabled", file.get("distributed.strategy") == "fsdp"))


def _if_enabled(key: str) -> Any:
    def read(value: Any, file: File) -> Outcome | Settings:
        if file.get("distributed") is not None and not _enabled(file):
            return ignored(_FSDP_OFF)
        return {key: value}

    return read


def _devices(value: Any, file: File) -> Outcome | Settings:
    return ignored("") if value == "auto" else {"topology.devices": value}


def _nodes(value: Any, file: File) -> Outcome | Settings:
    return {"topology.nodes": value} if value > 1 else ignored("")


def _prefetch(value: Any, file: File) -> Outcome | Settings:
    if value.upper() == "BACKWARD_PRE":
        return ignored("")
    return ignored("FSDP2 always gathers the next block's parameters early, as BACKWARD_PRE did")


def _model(value: Any, file: File) -> Settings:
    return {"model.architecture": "qwen3", "model.size": re.sub(r"^model_config_", "", value)}


def _scheduler(value: Any, file: File) -> Outcome | Settings:
    """LinearLR only warms up; the other two decay after it."""
    kind = {"linearlr": "constant", "cosineannealinglr": "cosine", "steplr": "step"}.get(str(value.get("type")).lower())
    if kind is None:
        return refused(f"{value.get('type')} is not here. Known: LinearLR, CosineAnnealingLR, StepLR")
    found: Settings = {"schedule.kind": kind}
    if value.get("warmup_steps"):
        found["schedule.warmup"] = value["warmup_steps"]
    if kind == "step":
        found |= {f"schedule.{key}": value[key] for key in ("step_size", "gamma") if key in value}
    return Outcome(found, why="LinearLR only warms up" if kind == "constant" else "")


def _optimizer(value: Any, file: File) -> Outcome | Settings:
    kind = our_word("optimizer.kind", value.get("type", "AdamW"))
    if kind is None:
        return refused(f"{value.get('type')} is not here. Known: AdamW")
    return {"optimizer.kind": kind} | {
        f"optimizer.{key}": value[key] for key in ("weight_decay", "betas", "eps", "lr") if key in value
    }


def _wandb(value: Any, file: File) -> Outcome | Settings:
    if not SWITCH.read(value.get("use_wandb", True)):
        return ignored("")
    names = {"project": "project", "entity": "entity", "tags": "tags", "run_name": "run_name"}
    return {"log.sinks": [{"kind": "wandb", **{ours: value[key] for key, ours in names.items() if value.get(key)}}]}


def _clip(value: Any, file: File) -> Outcome | Settings:
    if file.get("training.gradient_clip_algorithm", "norm") != "norm":
        return refused("gradients are clipped by their global norm, not by value")
    if file.get("training.gradient_clip_val") is not None and file.get("training.gradient_clip_val") != value:
        return ignored("gradient_clip_val is set, and wins")
    return {"optimizer.clip": value or None}


def _examples(value: Any, file: File) -> Outcome | Settings:
    """Named topologies: one alone is meant, of several one is chosen by name."""
    if len(value) != 1 or file.get("training_stages"):
        return ignored("they are presets here: fullshard train RECIPE --preset NAME, and your own in presets/NAME.yaml")
    from fullshard.dialects.translate import translate

    [(_, example)] = value.items()
    return translate(DIALECT, {"distributed": example}).settings


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _section(name: str, stage: Any) -> dict[str, Any]:
    if stage is not None and not isinstance(stage, dict):
        raise RecipeError(f"training_stages.{name}: {shown(stage)} is not a stage. Write a section with its settings.")
    return stage or {}


def _stages(file: File) -> dict[str, File]:
    """Each stage as a file of its own, with what the file says for all of them."""
    shared = {
        key: value for key, value in file.values.items() if key in ("logging", "wandb", "training", "distributed")
    }
    return {
        str(name): File({**shared, **_section(str(name), stage)}, file.folder)
        for name, stage in _mapping(file.get("training_stages")).items()
    }


DIALECT = Dialect(
    name="a staged config",
    title="A config with training stages",
    intro=(
        "`training_stages.<stage>` becomes `stages:`, with what all stages share above it; one stage alone "
        "becomes the\n"
        "recipe itself. The file is never edited: `--preset NAME` chooses a topology instead."
    ),
    marks=(
        "training_stages",
        "distributed_examples",
        "model_configs",
        "distributed.fsdp",
        "fsdp.cpu_offload",
        "fsdp.activation_checkpointing",
        "fsdp.sharding_strategy",
        "training.batch_size",
        "training.gradient_accumulation_steps",
        "wandb.use_wandb",
        "logging.log_file",
    ),
    stages=_stages,
    stages_key="training_stages",
    rows=(
        reads("sharding.strategy", _strategy, "distributed.strategy", takes=TEXT, note="auto, fsdp, ddp"),
        reads("topology.nodes", _nodes, "distributed.num_nodes"),
        reads("topology.devices", _devices, "distributed.devices", takes=AUTO | DEVICES, note="of one node"),
        to("sharding.sync_batchnorm", "distributed.sync_batchnorm"),
        part_of("distributed.fsdp.enabled fsdp.enabled", "the strategy", takes=SWITCH),
        reads(
            "sharding.strategy",
            _if_enabled("sharding.strategy"),
            "distributed.fsdp.sharding_strategy fsdp.sharding_strategy",
            takes=kind_of("sharding.strategy"),
        ),
        reads(
            "sharding.cpu_offload", _if_enabled("sharding.cpu_offload"), "distributed.fsdp.cpu_offload fsdp.cpu_offload"
        ),
        reads(
            "sharding.forward_prefetch",
            _if_enabled("sharding.forward_prefetch"),
            "distributed.fsdp.forward_prefetch fsdp.forward_prefetch",
        ),
        reads(
            "sharding.activation_checkpointing",
            _if_enabled("sharding.activation_checkpointing"),
            "distributed.fsdp.activation_checkpointing fsdp.activation_checkpointing",
        ),
        reads(
            "",
            _prefetch,
            "distributed.fsdp.backward_prefetch fsdp.backward_prefetch",
            takes=TEXT,
            note="no effect: always BACKWARD_PRE",
        ),
        unused(
            "distributed.fsdp.limit_all_gathers fsdp.limit_all_gathers",
            "FSDP2 bounds the gathered memory by itself",
            quiet=(),
        ),
        unused(
            "distributed.fsdp.use_orig_params fsdp.use_orig_params",
            "FSDP2 always keeps the original parameters",
            quiet=(),
        ),
        reads("model.size", _model, "model.model_config_key", note="qwen3 of that size"),
        to("model.tokenizer", "model.tokenizer_path"),
        to("model.attention=flash_attention_2", "model.use_flash_attention"),
        unused(
            "model.disable_flash_attention model.tie_weights model.freeze_embedder_decoder "
            "model.embedder_checkpoint_path",
            "the architecture decides; model.freeze freezes parameters by name",
            quiet=(False, True),
        ),
        to("batch.per_device", "training.batch_size"),
        to("batch.accumulate", "training.gradient_accumulation_steps"),
        to("duration.epochs", "training.epochs training.max_epochs"),
        to("duration.steps", "training.max_steps"),
        to("optimizer.lr", "training.learning_rate"),
        reads("optimizer.clip", _clip, "training.gradient_clip_val training.max_grad_norm", takes=NOT_NEGATIVE),
        unused("training.gradient_clip_algorithm", "gradients are clipped by their global norm", quiet=("norm",)),
        to("data.sequence_length", "training.sequence_length training.max_length"),
        to("precision", "training.mixed_precision training.precision"),
        reads(
            "sharding.activation_checkpointing",
            lambda value, file: {"sharding.activation_checkpointing": "full"} if value else ignored(""),
            "training.gradient_checkpointing",
            takes=SWITCH,
        ),
        to("evaluate.patience", "training.patience"),
        to("log.every_steps", "training.log_every_n_steps"),
        to("evaluate.every_steps", "training.val_check_interval_steps"),
        to("checkpoint.every_steps", "training.checkpointing.save_every_n_steps"),
        to("checkpoint.keep", "training.checkpointing.save_top_k"),
        reads(
            "checkpoint.best",
            lambda value, file: {"checkpoint.best.metric": value.removeprefix("val_")},
            "training.checkpointing.monitor",
            takes=TEXT,
        ),
        to("checkpoint.best.mode", "training.checkpointing.mode"),
        unused(
            "training.training_backend training.embed_sequence_length training.checkpointing.filename "
            "training.checkpointing.auto_insert_metric_name training.checkpointing.resume_from_checkpoint "
            "training.checkpointing.resume_ignore_mismatched_sizes",
            "checkpoints are named by step, and a run resumes exactly",
            quiet=("lightning", False),
        ),
        reads("optimizer.kind", _optimizer, "optimizer", takes=SECTION, note="type, weight_decay, betas, eps"),
        reads(
            "schedule.kind",
            _scheduler,
            "scheduler",
            takes=SECTION,
            note="LinearLR, CosineAnnealingLR, StepLR, with warmup_steps",
        ),
        to("data.train", "data.data_path"),
        to("data.workers", "data.num_workers"),
        unused(
            "data.max_samples data.use_processed_datasets data.pin_memory data.persistent_workers "
            "data.prefetch_factor datasets",
            "the loader pins and prefetches by itself; mixtures are data.train: {kind: mixture, ...}",
            quiet=(True, False, 2),
        ),
        reads(
            "output", trainer_arguments.run_folder, "checkpoint_dir", note="the run's folder: output and name together"
        ),
        unused("model_output_dir model_output_name", "the model is exported to the run's folder model/", quiet=()),
        reads("log.sinks", _wandb, "wandb", takes=SECTION, note="project, entity, tags, run_name"),
        to("log.debug", "logging.debug"),
        unused(
            "logging.log_file logging.enable_profiling logging.profiler_log_dir logging.save_steps "
            "logging.validation_steps",
            "log.txt and metrics.jsonl in the run folder",
            quiet=(False,),
        ),
        to("seed", "environment.seed"),
        unused(
            "environment.deterministic environment.benchmark", "the data order follows from seed", quiet=(True, False)
        ),
        reads(
            "sharding.strategy",
            _examples,
            "distributed_examples",
            takes=SECTION,
            note="presets: --preset NAME; one alone is in force",
        ),
        unused("model_configs global_config", "model.size names a size; defaults are fullshard's own", quiet=()),
        refuse("training_stages", "a stage is a mapping of sections", unless=()),
    ),
)
