"""The flat training YAML of an embedding trainer: model_name, data_path, use_lora, use_mrl and the like."""

from __future__ import annotations

from typing import Any

from fullshard.dialects import readers, trainer_arguments
from fullshard.dialects.kinds import ANY_WHOLE, COUNT, NOT_NEGATIVE, SWITCH, TEXT, TEXTS, WHOLE
from fullshard.dialects.rows import (
    Dialect,
    File,
    Outcome,
    Settings,
    ignored,
    part_of,
    reads,
    refuse,
    to,
    unused,
)

_LORA = {"r": 16, "alpha": 32, "dropout": 0.05}
_LOSSES = {
    "infonce": "infonce",
    "hard_negative": "in_batch_hard",
    "in_batch_hard": "in_batch_hard",
    "triplet": "triplet",
    "cosent": "cosent",
    "colbert": "late_interaction",
    "sigmoid": "sigmoid",
}


def _lora(value: Any, file: File) -> Outcome | Settings:
    if not value:
        return ignored("")
    found = {f"model.lora.{key}": file.get(f"lora_{key}", word) for key, word in _LORA.items()}
    targets = file.get("lora_target_modules")
    return found if targets is None else found | trainer_arguments.lora_targets(targets, file)


def _lora_key(value: Any, file: File) -> Outcome:
    """A key of LoRA, in force only with use_lora."""
    return Outcome(why="read with use_lora") if file.get("use_lora") else ignored("use_lora is off")


def _dims(value: Any, file: File) -> Outcome | Settings:
    return {"objective.matryoshka": value} if file.get("use_mrl") else ignored("use_mrl is off")


def _mrl(value: Any, file: File) -> Outcome | Settings:
    if not value or file.get("mrl_dims") is not None:
        return ignored("")
    return Outcome({"objective.matryoshka": [768, 512, 256, 128]}, why="mrl_dims is left out")


def _cache(value: Any, file: File) -> Outcome | Settings:
    chunk = file.get("gradient_cache_chunk_size", 8)
    return {"objective.cache": chunk} if value else ignored("")


def _strategy(value: Any, file: File) -> Settings:
    return {"sharding.strategy": "full" if value else "none"}


def _every(value: Any, file: File) -> Outcome | Settings:
    return {"checkpoint.every_steps": value} if value else ignored("")


def _eval_every(value: Any, file: File) -> Outcome | Settings:
    return {"evaluate.every_steps": value} if value else ignored("")


def _loss(value: Any, file: File) -> Outcome | Settings:
    found = _LOSSES.get(value.lower())
    if found is None:
        return Outcome(verdict="refused", why=f"{value} is not here. Known: {', '.join(_LOSSES)}")
    return {"objective.loss.kind": found}


DIALECT = Dialect(
    name="an embedding trainer",
    title="A flat training YAML for embeddings",
    intro=(
        "The YAML of a retrieval trainer: ten keys are enough. The model embeds, the loss is InfoNCE over the "
        "batch of\n"
        "all ranks. Sharding does not change gradients, so the learning rate needs no increase for FSDP."
    ),
    marks=(
        "model_name",
        "use_lora",
        "use_mrl",
        "mrl_dims",
        "use_fsdp",
        "val_data_path",
        "data_path",
        "use_gradient_cache",
        "retrieval_mode",
        "batch_size",
        "epochs",
    ),
    always={"model.kind": "sentence_transformer", "objective.kind": "contrastive"},
    rows=(
        to("model.path", "model_name model_name_or_path"),
        to("data.train", "data_path train_data_path"),
        to("data.validation", "val_data_path eval_data_path"),
        reads("output", trainer_arguments.run_folder, "output_dir", note="the run's folder: output and name together"),
        to("batch.per_device", "batch_size per_device_train_batch_size", default=32, note="of one GPU"),
        to("evaluate.per_device", "eval_batch_size"),
        to("batch.accumulate", "gradient_accumulation_steps"),
        to("duration.epochs", "epochs num_epochs num_train_epochs", default=3),
        reads("duration.steps", trainer_arguments.steps, "max_steps", takes=ANY_WHOLE),
        to("optimizer.lr", "learning_rate lr", default=2e-5, note="the same for DDP and FSDP: gradients are the same"),
        to("optimizer.weight_decay", "weight_decay"),
        reads("optimizer.clip", trainer_arguments.clip, "max_grad_norm", takes=NOT_NEGATIVE),
        reads("optimizer.kind", trainer_arguments.optimizer, "optim optimizer"),
        reads("schedule.kind", trainer_arguments.schedule, "scheduler_type lr_scheduler_type"),
        reads("schedule.warmup", readers.warmup, "warmup_ratio", default=0.1),
        reads("schedule.warmup", trainer_arguments.warmup_steps, "warmup_steps"),
        reads("sharding.strategy", _strategy, "use_fsdp", takes=SWITCH, note="true: full; false: none"),
        to("sharding.activation_checkpointing", "gradient_checkpointing"),
        reads("model.lora", _lora, "use_lora", takes=SWITCH, note="r 16, alpha 32, dropout 0.05"),
        reads("model.lora.r", _lora_key, "lora_r"),
        reads("model.lora.alpha", _lora_key, "lora_alpha"),
        reads("model.lora.dropout", _lora_key, "lora_dropout"),
        reads("model.lora.targets", _lora_key, "lora_target_modules"),
        reads("objective.matryoshka", _mrl, "use_mrl", takes=SWITCH),
        reads("objective.matryoshka", _dims, "mrl_dims", note="the vector is cut: there are no projection layers"),
        reads("objective.cache", _cache, "use_gradient_cache", takes=SWITCH, note="saves memory, also under FSDP"),
        part_of("gradient_cache_chunk_size", "use_gradient_cache", takes=COUNT),
        reads("objective.loss.kind", _loss, "loss_type", takes=TEXT),
        to("objective.loss.temperature", "temperature"),
        to("data.sequence_length", "max_length max_seq_length"),
        to("data.workers", "num_workers dataloader_num_workers"),
        to("data.encode.mode", "retrieval_mode"),
        to("data.encode.image_root", "image_root"),
        to("data.encode.column_mapping", "column_mapping"),
        to("model.attention", "attn_implementation"),
        to("model.pooling", "pooling pooling_method"),
        to("model.normalize", "normalize"),
        to("model.trust_remote_code", "trust_remote_code"),
        reads("precision", trainer_arguments.dtype, "torch_dtype dtype"),
        to("precision", "mixed_precision"),
        to("precision=bf16", "bf16"),
        to("precision=fp16", "fp16"),
        to("topology.device", "compute_device device"),
        to("topology.devices", "num_processes devices num_gpus"),
        reads("checkpoint.every_steps", _every, "save_steps", takes=WHOLE, note="0: not by steps"),
        reads("evaluate.every_steps", _eval_every, "eval_steps", takes=WHOLE, note="0: not by steps"),
        to("evaluate.patience", "early_stopping_patience"),
        to("checkpoint.best.metric", "eval_metric"),
        to("log.every_steps", "logging_steps"),
        reads("log.sinks", readers.trackers, "report_to tracker", takes=TEXTS),
        to("name", "run_name"),
        to("seed", "seed"),
        unused("resume_from_checkpoint resume_mode", "the same command resumes; --resume PATH names a checkpoint"),
        unused("tags notes", "give them to the sink: log.sinks=[{kind: wandb, tags: [...]}]", quiet=([], "")),
        refuse("load_in_4bit load_in_8bit", "quantised weights are not trained: model.lora: true keeps frozen weights"),
    ),
)
