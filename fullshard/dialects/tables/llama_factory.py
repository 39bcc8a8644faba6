"""LLaMA-Factory's YAML: TrainingArguments with finetuning_type, dataset, template, cutoff_len and the like."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullshard.dialects import readers, trainer_arguments
from fullshard.dialects.kinds import COUNT, NOT_NEGATIVE, POSITIVE, SWITCH, TEXT, TEXTS, one_of
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
from fullshard.dialects.tables import hf_trainer

_OTHER_STAGES = ("rm", "ppo", "dpo", "kto")
_NOT_HERE = Outcome(verdict="refused", why="preference and reward training are not available: sft and pt are")


def _stage(value: Any, file: File) -> Outcome | Settings:
    return ignored("") if value in ("sft", "pt") else _NOT_HERE


def _dataset(value: Any, file: File) -> Outcome | Settings:
    """Names in dataset_info.json, which says the file or the hub name of each."""
    known = _known(file)
    missing = [name for name in value if name not in known]
    if missing:
        return refused(f"{missing[0]} is not in {_info(file)}: write data.train, a path or {{kind: hub, name: ...}}")
    found = [_source(known[name], file) for name in value]
    if len(found) > 1 and not all(isinstance(source, str) for source in found):
        return refused(readers.mixture(found))
    settings: Settings = {"data.train": found[0] if len(found) == 1 else found}
    if file.get("stage") == "pt":
        settings["data.encode"] = "text"
    return settings


def _info(file: File) -> Path:
    return file.folder / str(file.get("dataset_dir", "data")) / "dataset_info.json"


def _known(file: File) -> dict[str, Any]:
    path = _info(file)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _source(entry: dict[str, Any], file: File) -> Any:
    limit = file.get("max_samples")
    if "hf_hub_url" in entry:
        split = entry.get("split", "train") + (f"[:{limit}]" if limit else "")
        return readers.dataset(
            entry["hf_hub_url"], split=None if split == "train" else split, config=entry.get("subset")
        )
    path = str(Path(str(file.get("dataset_dir", "data"))) / entry.get("file_name", ""))
    return {"kind": "files", "path": path, "limit": limit} if limit else path


def _finetuning(value: Any, file: File) -> Outcome | Settings:
    if value == "full":
        return ignored("")
    if value != "lora":
        return refused(f"{value} is not available: lora and full are; model.freeze freezes parameters by name")
    rank = file.get("lora_rank", 8)
    return {"model.lora.r": rank, "model.lora.alpha": file.get("lora_alpha", 2 * rank)}


def _flash(value: Any, file: File) -> Outcome | Settings:
    return {"model.attention": {"fa2": "flash_attention_2", "disabled": "eager"}.get(value, value)}


def _holdout(value: Any, file: File) -> Outcome | Settings:
    if value > 1:
        return refused("a number of held-out records is not available: write a share below 1, or data.validation")
    return {"data.holdout": value}


def _pack(value: Any, file: File) -> Outcome | Settings:
    """Left out, only pre-training packs; neat_packing keeps documents apart, as rows here always do."""
    if file.get("packing") is None and file.get("neat_packing") is None and file.get("stage") == "pt":
        return Outcome({"data.pack": True}, why="pre-training packs")
    if file.get("neat_packing") or file.get("packing"):
        why = "" if file.get("neat_packing") else "documents in a row do not see each other, as with neat_packing"
        return Outcome({"data.pack": True}, why=why)
    return {"data.pack": False}


def _left_out(settings: Settings, file: File) -> Iterator[Said]:
    """Without bf16 and fp16 the model computes in the dtype of its file there."""
    if "precision" in settings:
        return
    if file.get("bf16") is False and file.get("fp16") is False:
        yield Said("bf16", False, "default", {"precision": "fp32"}, "both are off")
    else:
        why = "neither bf16 nor fp16 is on: LLaMA-Factory computes in the dtype of the model's file"
        yield Said("bf16", False, "default", {"precision": "auto"}, why)


OWN = (
    reads("", _stage, "stage", takes=one_of("sft", "pt", *_OTHER_STAGES), note="sft and pt; others are refused"),
    reads("model.lora", _finetuning, "finetuning_type", takes=TEXT, default="lora", note="lora or full"),
    part_of("lora_rank", "finetuning_type", takes=COUNT),
    part_of("lora_alpha", "finetuning_type", takes=POSITIVE),
    to("model.lora.dropout", "lora_dropout", default=0.0),
    reads(
        "model.lora.targets",
        trainer_arguments.lora_targets,
        "lora_target",
        takes=TEXTS,
        default="all",
        note="all is all-linear",
    ),
    reads("data.train", _dataset, "dataset", takes=TEXTS, note="names in dataset_info.json"),
    part_of("dataset_dir", "dataset", takes=TEXT),
    part_of("max_samples", "dataset", takes=COUNT),
    unused("template default_system enable_thinking", "the tokenizer's own chat template is used", quiet=()),
    to("data.sequence_length", "cutoff_len", default=2048),
    reads("data.holdout", _holdout, "val_size", takes=NOT_NEGATIVE, default=0.0),
    reads("data.pack", _pack, "packing neat_packing", default=False, note="for pt: true"),
    reads(
        "sharding.activation_checkpointing",
        lambda value, file: {"sharding.activation_checkpointing": "none" if value else "full"},
        "disable_gradient_checkpointing",
        takes=SWITCH,
        default=False,
    ),
    reads(
        "model.attention",
        _flash,
        "flash_attn",
        takes=one_of("auto", "disabled", "sdpa", "fa2"),
        note="fa2, sdpa, disabled, auto",
    ),
    to("precision=bf16-pure", "pure_bf16"),
    to("data.encode={kind: chat, train_on: all}", "train_on_prompt"),
    refuse(
        "quantization_bit quantization_method",
        "quantised weights are not trained: finetuning_type: lora keeps frozen weights as stored",
    ),
    refuse("use_dora use_galore use_badam use_apollo use_rslora pissa_init loraplus_lr_ratio", "not available"),
    refuse("additional_target", "modules are either frozen or adapted, never trained beside adapters", unless=("", [])),
    refuse("pref_beta pref_loss pref_ftx reward_model ref_model", "preference and reward training are not available"),
    unused(
        "ray_num_workers ray_storage_path ray_init_kwargs resources_per_worker placement_strategy",
        "it says how Ray starts processes",
        quiet=(),
    ),
    refuse("mask_history", "every answer of a conversation is learned, not only the last one"),
    refuse("resize_vocab", "resize the embedding with model.resize_embedding"),
    unused("image_max_pixels video_max_pixels", "the model's own processor decides the size of images", quiet=()),
    unused("freeze_vision_tower freeze_multi_modal_projector", "model.freeze freezes parameters by name", quiet=()),
    refuse("adapter_name_or_path", "to train an adapter further write model.path: its folder", unless=("",)),
    unused(
        "plot_loss overwrite_cache preprocessing_num_workers preprocessing_batch_size save_only_model "
        "upcast_layernorm use_unsloth enable_liger_kernel ray_run_name cache_dir "
        "use_fast_tokenizer include_num_input_tokens_seen use_swanlab tokenized_path",
        "it does not change what is learned",
        quiet=(True, False),
    ),
)

DIALECT = Dialect(
    name="LLaMA-Factory",
    title="LLaMA-Factory",
    intro=(
        "Its keys are those of the Hugging Face Trainer and the ones below. `dataset` names entries of\n"
        "`dataset_info.json` in `dataset_dir`, which is read beside the file."
    ),
    marks=(
        "finetuning_type",
        "cutoff_len",
        "template",
        "stage",
        "dataset",
        "lora_target",
        "dataset_dir",
        "val_size",
        "plot_loss",
        "lora_rank",
    ),
    prepare=trainer_arguments.load_fsdp_config,
    no_adapters=lambda file: (
        "" if file.get("finetuning_type", "lora") == "lora" else f"finetuning_type is {file.get('finetuning_type')}"
    ),
    finish=_left_out,
    rows=(*OWN, *inherited(OWN, hf_trainer.DIALECT.rows)),
)
