"""torchtune's YAML: sections with a `_component_`, read for the component's name and its settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fullshard.dialects import readers, trainer_arguments
from fullshard.dialects.kinds import COUNT, LIST, NOT_NEGATIVE, POSITIVE, SWITCH, TEXT, TEXTS, WHOLE
from fullshard.dialects.rows import (
    Dialect,
    File,
    Outcome,
    Said,
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

_KNOWN_SETS = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "grammar_dataset": "liweili/c4_200m",
    "samsum_dataset": "Samsung/samsum",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
}

_REFERENCE = r"\$\{([\w.]+)\}"


def _model(value: Any, file: File) -> Outcome | Settings:
    name = value.rpartition(".")[2]
    if name.startswith("qlora"):
        return refused("quantised weights are not trained: a lora_... component keeps frozen weights as stored")
    if not name.startswith("lora"):
        return ignored("checkpointer.checkpoint_dir holds the weights and says which model it is")
    targets = list(file.get("model.lora_attn_modules", []))
    targets += ["gate_proj", "up_proj", "down_proj"] if file.get("model.apply_lora_to_mlp") else []
    targets = ["o_proj" if target == "output_proj" else target for target in targets]
    rank = file.get("model.lora_rank", 8)
    settings: Settings = {"model.lora.r": rank, "model.lora.alpha": file.get("model.lora_alpha", 2 * rank)}
    return settings | ({"model.lora.targets": targets} if targets else {})


def _dataset(value: Any, file: File) -> Outcome | Settings:
    name = value.rpartition(".")[2]
    if file.get("dataset.data_files") is not None:
        return {"data.train": file.get("dataset.data_files")} | _column(name, file)
    source = file.get("dataset.source", _KNOWN_SETS.get(name))
    if source is None:
        return refused(f"the data of {name} is not known: write data.train, a path or {{kind: hub, name: ...}}")
    split = file.get("dataset.split")
    found = readers.dataset(source, split=None if split == "train" else split, config=file.get("dataset.name"))
    return {"data.train": found} | _column(name, file)


def _column(name: str, file: File) -> Settings:
    if name == "text_completion_dataset":
        return {"data.encode": {"kind": "text", "column": file.get("dataset.column", "text")}}
    # The alpaca sets of torchtune learn the prompt as well, unless told otherwise.
    learns_input = file.get("dataset.train_on_input", name.startswith("alpaca"))
    if learns_input and name != "wikitext_dataset":
        return {"data.encode": {"kind": "chat", "train_on": "all"}}
    return {}


def _dtype(value: Any, file: File) -> Outcome | Settings:
    is_lora = str(file.get("model._component_", "")).rpartition(".")[2].startswith("lora")
    if value == "bf16" and not is_lora:
        return Outcome({"precision": "bf16-pure"}, why="torchtune keeps weights and optimizer state in bf16")
    return {"precision": value}


def _optimizer(value: Any, file: File) -> Outcome | Settings:
    ours = our_word("optimizer.kind", value)
    return {"optimizer.kind": ours} if ours else refused(f"{value} is not here. Known: adamw, adamw_8bit, muon")


def _schedule(value: Any, file: File) -> Outcome | Settings:
    ours = our_word("schedule.kind", value)
    return {"schedule.kind": ours} if ours else refused(f"{value} is not here. Known: constant, linear, cosine, step")


def _steps_per_epoch(value: Any, file: File) -> Outcome | Settings:
    if file.get("epochs", 1) != 1:
        return refused("steps per epoch are not a setting: with several epochs write duration.steps for all of them")
    return {"duration.steps": value}


def _epochs(value: Any, file: File) -> Outcome | Settings:
    return (
        ignored("max_steps_per_epoch says the steps") if file.get("max_steps_per_epoch") else {"duration.epochs": value}
    )


def _logger(value: Any, file: File) -> Outcome | Settings:
    name = value.rpartition(".")[2]
    if name == "WandBLogger":
        return {"log.sinks": [{"kind": "wandb", "project": file.get("metric_logger.project", "torchtune")}]}
    return {"log.sinks": ["tensorboard"]} if name == "TensorBoardLogger" else ignored("metrics.jsonl has every number")


def _interpolated(file: File) -> File:
    """`${batch_size}` stands for the value of another key."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        whole = re.fullmatch(_REFERENCE, value) if isinstance(value, str) else None
        if whole:
            return file.get(whole[1], value)
        if not isinstance(value, str):
            return value
        return re.sub(_REFERENCE, lambda name: str(file.get(name[1], name[0])), value)

    return File(filled(dict(file.values)), file.folder)


def _left_out(settings: Settings, file: File) -> Iterator[Said]:
    """torchtune sets no limit on the tokens of a sample; a row here has a length."""
    if "data.sequence_length" not in settings:
        why = "torchtune sets no limit; longer samples are cut here, so set it to your longest"
        yield Said("tokenizer.max_seq_len", None, "default", {"data.sequence_length": 1024}, why)


DIALECT = Dialect(
    name="torchtune",
    title="torchtune",
    intro=(
        "The recipes of fine-tuning with and without LoRA, for one device and for several. The model is what\n"
        "`checkpointer.checkpoint_dir` holds, a folder of Transformers; `tune download` makes such a folder."
    ),
    marks=(
        "*._component_",
        "model._component_",
        "checkpointer",
        "metric_logger",
        "dataset._component_",
        "tokenizer._component_",
    ),
    prepare=_interpolated,
    finish=_left_out,
    always={"data.holdout": 0},
    rows=(
        to("model.path", "checkpointer.checkpoint_dir"),
        unused(
            "checkpointer._component_ checkpointer.checkpoint_files checkpointer.model_type "
            "checkpointer.recipe_checkpoint checkpointer.adapter_checkpoint checkpointer.safe_serialization "
            "checkpointer.output_dir checkpointer.keep_last_n_checkpoints",
            "the folder's own config and index say it",
            quiet=(),
        ),
        reads("model.lora", _model, "model._component_", takes=TEXT, note="lora_...: adapters; qlora_... is refused"),
        part_of("model.lora_attn_modules", "model._component_", takes=TEXTS),
        part_of("model.apply_lora_to_mlp", "model._component_", takes=SWITCH),
        part_of("model.lora_rank", "model._component_", takes=COUNT),
        part_of("model.lora_alpha", "model._component_", takes=POSITIVE),
        refuse("model.apply_lora_to_output", "there is no adapter on the head"),
        refuse("model.use_dora", "not available: adapters are plain LoRA"),
        to("model.lora.dropout", "model.lora_dropout"),
        unused(
            "tokenizer._component_ tokenizer.path tokenizer.merges_file tokenizer.special_tokens_path "
            "tokenizer.prompt_template tokenizer.truncation_type tokenizer.vocab_path tokenizer.merges_path",
            "the tokenizer beside the model is used",
            quiet=(),
        ),
        to("data.sequence_length", "tokenizer.max_seq_len"),
        reads(
            "data.train",
            _dataset,
            "dataset._component_",
            takes=TEXT,
            note="its source, data_files, or the set it stands for",
        ),
        part_of("dataset.source dataset.split dataset.column dataset.name", "dataset._component_", takes=TEXT),
        part_of("dataset.data_files", "dataset._component_", takes=TEXT | LIST),
        part_of("dataset.train_on_input", "dataset._component_", takes=SWITCH),
        unused(
            "dataset.conversation_column dataset.conversation_style dataset.column_map",
            "data.encode finds messages, prompts and answers by the names of their columns",
            quiet=(),
        ),
        refuse("dataset.new_system_prompt", "write the system prompt into the data"),
        to("data.pack", "dataset.packed packed", default=False),
        unused("dataset_val", "write data.validation", quiet=()),
        to("data.shuffle", "shuffle"),
        to("seed", "seed"),
        to("batch.per_device", "batch_size"),
        to("evaluate.per_device", "batch_size_val"),
        to("batch.accumulate", "gradient_accumulation_steps"),
        reads("duration.steps", _steps_per_epoch, "max_steps_per_epoch", note="with one epoch"),
        reads("duration.epochs", _epochs, "epochs"),
        reads("optimizer.kind", _optimizer, "optimizer._component_"),
        to("optimizer.lr", "optimizer.lr"),
        to("optimizer.weight_decay", "optimizer.weight_decay", default=0.01),
        to("optimizer.betas", "optimizer.betas", default=[0.9, 0.999]),
        to("optimizer.eps", "optimizer.eps"),
        unused("optimizer.fused optimizer.foreach optimizer_in_bwd", "the optimizer is fused", quiet=(True, False)),
        reads(
            "optimizer.clip",
            trainer_arguments.clip,
            "clip_grad_norm",
            takes=NOT_NEGATIVE,
            default=0,
            note="left out: no clipping",
        ),
        reads("schedule.kind", _schedule, "lr_scheduler._component_", default="none"),
        to("schedule.warmup", "lr_scheduler.num_warmup_steps"),
        unused("lr_scheduler.num_cycles", "one half cosine", quiet=(0.5,)),
        reads("precision", _dtype, "dtype", note="bf16: bf16-pure, as there; for LoRA bf16"),
        to("topology.device", "device"),
        to("sharding.activation_checkpointing", "enable_activation_checkpointing"),
        to("sharding.cpu_offload", "fsdp_cpu_offload"),
        reads(
            "sharding.strategy",
            lambda value, file: {"sharding.strategy": "full" if value else "grad_op"},
            "fsdp_reshard_after_forward",
            takes=SWITCH,
        ),
        to("sharding.compile", "compile"),
        reads("output", trainer_arguments.run_folder, "output_dir", note="the run's folder: output and name together"),
        reads("log.sinks", _logger, "metric_logger._component_", takes=TEXT),
        unused(
            "metric_logger.log_dir metric_logger.project", "read with the logger; files are in the run folder", quiet=()
        ),
        to("log.every_steps", "log_every_n_steps"),
        to("checkpoint.every_steps", "save_every_n_steps"),
        to("evaluate.every_steps", "run_val_every_n_steps"),
        unused("resume_from_checkpoint", "the same command resumes; --resume PATH names a checkpoint"),
        unused(
            "loss loss._component_ loss.num_output_chunks", "the loss is cross-entropy, computed in chunks", quiet=()
        ),
        unused(
            "log_peak_memory_stats log_level profiler save_adapter_weights_only enable_async_checkpointing "
            "enable_activation_offloading custom_sharded_layers memory_efficient_fsdp_wrap ac_mode ac_option "
            "cudnn_deterministic_mode max_validation_batches keep_last_n_checkpoints low_cpu_ram",
            "it does not change what is learned",
            quiet=(True, False),
        ),
        refuse(
            "tensor_parallel_dim tensor_parallel_plan context_parallel_dim expert_parallel_dim",
            "there is no tensor or context parallelism",
            unless=(1,),
        ),
        refuse("quantizer", "quantisation-aware training is not available"),
        reads(
            "sharding.strategy",
            lambda value, file: {"sharding.strategy": "hybrid"} if value > 1 else ignored(""),
            "data_parallel_replicate_dim",
            takes=WHOLE,
        ),
        unused("data_parallel_shard_dim", "all other ranks shard", quiet=(-1,)),
    ),
)
