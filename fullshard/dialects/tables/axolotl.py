"""axolotl's YAML: base_model, datasets, sequence_len, sample_packing, adapter and the like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fullshard.dialects import readers, trainer_arguments
from fullshard.dialects.kinds import (
    ANY_WHOLE,
    NOT_NEGATIVE,
    SWITCH,
    TEXT,
    WHOLE,
    BadValue,
    one_of,
)
from fullshard.dialects.rows import (
    Dialect,
    File,
    Outcome,
    Said,
    Settings,
    ignored,
    inherited,
    part_of,
    reads,
    refuse,
    refused,
    to,
    unused,
)

_HALF = SWITCH | one_of("auto", "full")
_CHAT = "the tokenizer's own chat template is used"


def _datasets(value: Any, file: File) -> Outcome | Settings:
    """A list of data sets: one, or several files."""
    entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in _listed(value)]
    found = [_one(entry) for entry in entries]
    settings: Settings = {"data.train": found[0] if len(found) == 1 else found}
    if len(found) > 1 and not all(isinstance(source, str) for source in found):
        return refused(readers.mixture(found))
    kinds = [entry.get("type") for entry in entries]
    if kinds and all(str(kind).split(":")[0] in ("completion", "pretrain") for kind in kinds):
        column = entries[0].get("field", "text")
        settings["data.encode"] = {"kind": "text", "column": column}
    elif file.get("train_on_inputs"):
        settings["data.encode"] = {"kind": "chat", "train_on": "all"}
    return settings


def _listed(value: Any) -> list[Any]:
    if value == []:
        raise BadValue(value, "a list of at least one data set")
    return value if isinstance(value, list) else [value]


def _one(entry: dict[str, Any]) -> Any:
    files = entry.get("data_files")
    if files and entry.get("path") in ("json", "csv", "parquet", "text"):
        return files if isinstance(files, str) else list(files)
    split = entry.get("split")
    if "path" not in entry:
        raise BadValue(entry, "a path, or a section with a path")
    return readers.dataset(
        TEXT.read(entry["path"]), split=None if split == "train" else split, config=entry.get("name")
    )


def _validation(value: Any, file: File) -> Outcome | Settings:
    found = _datasets(value, file)
    return {"data.validation": found["data.train"]} if isinstance(found, dict) else found


def _holdout(value: Any, file: File) -> Outcome | Settings:
    if value > 1:
        return refused("a number of held-out records is not available: write a share below 1, or data.validation")
    return {"data.holdout": value}


def _adapter(value: Any, file: File) -> Outcome | Settings:
    if value == "lora":
        return {"model.lora": True}
    if value is False:
        return ignored("")
    why = f"{value} is not available: adapter: lora trains adapters on weights as they are stored"
    # Without it an import would train the whole model.
    return Outcome({"model.lora": True}, "refused", why) if value == "qlora" else refused(why)


def _linear(value: Any, file: File) -> Outcome | Settings:
    return {"model.lora.targets": "all-linear"} if value and not file.get("lora_target_modules") else ignored("")


def _half(word: str) -> Any:
    def read(value: Any, file: File) -> Outcome | Settings:
        words = {"auto": "auto", "full": "bf16-pure", True: word}
        return {"precision": words[value]} if value else ignored("")

    return read


def _per_epoch(section: str) -> Any:
    def read(value: Any, file: File) -> Outcome | Settings:
        if not value:
            return {f"{section}.every_epochs": None}
        why = "" if value == 1 else f"{value} times per epoch: {section}.every_steps says it in steps"
        return Outcome({f"{section}.every_epochs": 1}, why=why)

    return read


def _every(section: str) -> Any:
    def read(value: Any, file: File) -> Outcome | Settings:
        if 0 < value < 1:
            return refused(f"{value} of the run is not an interval here: write {section}.every_steps in steps")
        return {f"{section}.every_steps": value, f"{section}.every_epochs": None} if value else ignored("")

    return read


def _wandb(value: Any, file: File) -> Outcome | Settings:
    sink = {"kind": "wandb", "project": value}
    for theirs, ours in (("wandb_entity", "entity"), ("wandb_name", "run_name"), ("wandb_run_id", "run_name")):
        if file.get(theirs):
            sink.setdefault(ours, file.get(theirs))
    return {"log.sinks": [sink]} if value else ignored("")


def _recompute(value: Any, file: File) -> Outcome | Settings:
    if value in ("offload", "offload_disk"):
        return Outcome({"sharding.activation_checkpointing": "full"}, why="activations are recomputed, never moved")
    return {"sharding.activation_checkpointing": "full" if value else "none"}


def _warmup(value: Any, file: File) -> Outcome | Settings:
    """Left out it is 3% of the run, and at most 100 steps."""
    if file.get("warmup_ratio") is not None:
        return readers.warmup(value, file)
    if file.get("max_steps", 0) > 0:
        return {"schedule.warmup": min(int(value * file.get("max_steps")), 100)}
    return Outcome({"schedule.warmup": value}, why="axolotl stops at 100 steps")


def _left_out(settings: Settings, file: File) -> Iterator[Said]:
    """A section of FSDP without a strategy is full; both kinds of half precision switched off is fp32."""
    if file.get("fsdp_config") and "sharding.strategy" not in settings:
        yield Said("fsdp_config", "a section", "default", {"sharding.strategy": "full"}, "it names no strategy")
    if "precision" not in settings and (file.get("bf16", file.get("bfloat16")) is False):
        yield Said("fp16", False, "default", {"precision": "fp32"}, "neither bf16 nor fp16 is on")


OWN = (
    to("model.path", "base_model"),
    to("model.revision", "revision_of_model"),
    to("model.tokenizer", "tokenizer_config"),
    unused(
        "model_type tokenizer_type processor_type is_llama_derived_model tokenizer_use_fast tokenizer_legacy "
        "base_model_config",
        "the class follows from the model's own config",
        quiet=(False, True),
    ),
    reads("data.train", _datasets, "datasets", note="a path or a hub name, with type, split and name"),
    reads("data.train", _datasets, "pretraining_dataset"),
    reads("data.validation", _validation, "test_datasets"),
    reads("data.holdout", _holdout, "val_set_size", takes=NOT_NEGATIVE, default=0.0),
    unused(
        "dataset_prepared_path dataset_processes dataset_keep_in_memory shuffle_merged_datasets "
        "dataset_exact_deduplication skip_prepare_dataset",
        "data is encoded once and cached by content; every epoch has a new order",
        quiet=(True, False),
    ),
    part_of("train_on_inputs", "datasets", takes=SWITCH),
    unused("chat_template chat_template_jinja default_system_message", _CHAT, quiet=("tokenizer_default",)),
    unused("train_on_eos train_on_eot", "the answers are learned, with the token that ends them", quiet=("turn",)),
    refuse(
        "roles_to_train",
        "the assistant's turns are learned, or all tokens: data.encode: {kind: chat, train_on: all}",
        unless=(["assistant"],),
    ),
    to("data.sequence_length", "sequence_len", default=512),
    to("data.pack", "sample_packing", default=False),
    unused(
        "eval_sample_packing pad_to_sequence_len sample_packing_group_size sample_packing_bin_size "
        "multipack_real_batches excess_length_strategy",
        "rows are packed by data.pack, in training and validation alike",
        quiet=(True, False),
    ),
    reads("model.lora", _adapter, "adapter", takes=readers.OFF | TEXT, note="lora; qlora is refused"),
    to("model.lora.r", "lora_r"),
    to("model.lora.alpha", "lora_alpha"),
    to("model.lora.dropout", "lora_dropout"),
    reads("model.lora.targets", trainer_arguments.lora_targets, "lora_target_modules"),
    reads("model.lora.targets", _linear, "lora_target_linear", takes=SWITCH, note="all-linear"),
    unused(
        "lora_fan_in_fan_out lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_on_cpu",
        "adapters are computed as in peft",
        quiet=(False, True),
    ),
    refuse(
        "lora_modules_to_save",
        "modules are either frozen or adapted: freeze the rest of the model with model.freeze instead",
        unless=([], None),
    ),
    refuse("peft_use_dora peft_use_rslora", "not available: adapters are plain LoRA, scaled by alpha / r"),
    refuse("unfrozen_parameters", "write the other parameters, which stay frozen, as model.freeze", unless=([],)),
    refuse("lora_model_dir", "to train an adapter further write model.path: its folder", unless=("",)),
    to("checkpoint.keep", "save_total_limit", default=4),
    to("batch.per_device", "micro_batch_size", default=1),
    refuse(
        "batch_size",
        "write gradient_accumulation_steps: a step has micro_batch_size x gradient_accumulation_steps x GPUs rows",
    ),
    to("evaluate.per_device", "eval_batch_size"),
    to("duration.epochs", "num_epochs", default=1),
    reads("duration.steps", trainer_arguments.steps, "max_steps", takes=ANY_WHOLE),
    reads("optimizer.kind", trainer_arguments.optimizer, "optimizer"),
    reads("schedule.kind", trainer_arguments.schedule, "lr_scheduler", default="cosine"),
    to("schedule.floor", "cosine_min_lr_ratio"),
    reads("schedule.warmup", _warmup, "warmup_ratio", default=0.03, note="left out: at most 100 steps there"),
    refuse(
        "cosine_constant_lr_ratio lr_quadratic_warmup lr_groups embedding_lr embedding_lr_scale loraplus_lr_ratio",
        "not available: optimizer.groups sets rates by parameter name",
    ),
    reads("precision", _half("bf16"), "bf16 bfloat16", takes=_HALF, note="auto is auto, full is bf16-pure"),
    reads("precision", _half("fp16"), "fp16 float16", takes=SWITCH),
    reads(
        "sharding.activation_checkpointing",
        _recompute,
        "gradient_checkpointing activation_offloading",
        takes=SWITCH | one_of("offload", "offload_disk"),
    ),
    to("model.attention=flash_attention_2", "flash_attention flash_attn"),
    to("model.attention", "attn_implementation"),
    to("model.attention=sdpa", "sdp_attention"),
    to("model.attention=eager", "eager_attention"),
    to("model.attention=flex_attention", "flex_attention"),
    unused(
        "xformers_attention s2_attention flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp "
        "flash_attn_fuse_qkv",
        "model.attention chooses the kernel",
        quiet=(False,),
    ),
    reads("evaluate.every_epochs", _per_epoch("evaluate"), "evals_per_epoch", takes=WHOLE),
    reads("checkpoint.every_epochs", _per_epoch("checkpoint"), "saves_per_epoch", takes=WHOLE),
    reads("evaluate.every_steps", _every("evaluate"), "eval_steps", takes=NOT_NEGATIVE),
    reads("checkpoint.every_steps", _every("checkpoint"), "save_steps", takes=NOT_NEGATIVE),
    reads("log.sinks", _wandb, "wandb_project", takes=readers.OFF | TEXT),
    unused(
        "wandb_entity wandb_name wandb_run_id wandb_watch wandb_log_model wandb_mode",
        "read with wandb_project; wandb's own variables apply",
        quiet=("",),
    ),
    to("log.sinks=[tensorboard]", "use_tensorboard"),
    unused("special_tokens", "padding is never learned; other tokens come from the tokenizer", quiet=({},)),
    refuse(
        "tokens added_tokens_overrides resize_token_embeddings_to_32x",
        "add the tokens to the tokenizer's folder, and name it in model.tokenizer",
        unless=([], {}, False),
    ),
    to("model.trust_remote_code", "trust_remote_code"),
    refuse(
        "load_in_8bit load_in_4bit", "quantised weights are not trained: adapter: lora keeps frozen weights as stored"
    ),
    refuse("rl dpo_beta rl_beta reward_model", "preference training is not available"),
    refuse(
        "context_parallel_size sequence_parallel_degree tensor_parallel_size",
        "there is no tensor or context parallelism",
        unless=(1, 0),
    ),
    reads(
        "sharding.strategy",
        lambda value, file: {"sharding.strategy": "hybrid"} if value > 1 else ignored(""),
        "dp_replicate_size",
        takes=ANY_WHOLE,
    ),
    unused("dp_shard_size", "all other ranks shard", quiet=()),
    unused(
        "strict debug seed_all save_safetensors save_only_model save_first_step eval_table_size "
        "eval_max_new_tokens eval_causal_lm_metrics loss_watchdog_threshold loss_watchdog_patience "
        "do_bench_eval local_rank hub_model_id plugins liger_rope liger_rms_norm liger_glu_activation "
        "liger_fused_linear_cross_entropy liger_swiglu cut_cross_entropy ddp fix_untrained_tokens",
        "it does not change what is learned",
        quiet=(False, True, "", [], 0),
    ),
)


DIALECT = Dialect(
    name="axolotl",
    title="axolotl",
    intro=(
        "axolotl hands most keys to the Hugging Face Trainer, so that table applies as well. What a file leaves "
        "out is\n"
        "as axolotl does it: micro-batches of one row, one epoch, cosine decay, no weight decay, no packing, nothing\n"
        "held out, rows of 512 tokens, a warm-up of 3% of the run."
    ),
    marks=(
        "base_model",
        "datasets",
        "micro_batch_size",
        "sequence_len",
        "sample_packing",
        "adapter",
        "lora_target_linear",
        "val_set_size",
        "num_epochs",
        "lr_scheduler",
        "evals_per_epoch",
        "saves_per_epoch",
        "dataset_prepared_path",
    ),
    prepare=trainer_arguments.load_fsdp_config,
    no_adapters=lambda file: (
        "" if file.get("adapter") in ("lora", "qlora") else "adapter is not set, so axolotl trains the whole model"
    ),
    finish=_left_out,
    rows=(*OWN, *inherited(OWN, trainer_arguments.COMMON)),
)
