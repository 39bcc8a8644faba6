"""TrainingArguments of the Hugging Face Trainer, with the model and data arguments of its scripts and of TRL's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fullshard.dialects import trainer_arguments as arguments
from fullshard.dialects.kinds import ANY_WHOLE, SECTION, SWITCH, TEXT, TEXTS, number
from fullshard.dialects.rows import Dialect, File, Outcome, Said, Settings, part_of, reads, refuse, to, unused

_TARGETS = ["q_proj", "v_proj"]


def _targets(value: Any, file: File) -> Outcome | Settings:
    found = arguments.lora_targets(value, file)
    if file.get("lora_target_modules") is None:
        return Outcome(found, why="peft's default for most decoders")
    return found


def _left_out(settings: Settings, file: File) -> Iterator[Said]:
    """TRL recomputes activations unless told otherwise, and has a learning rate of its own."""
    yield from arguments.precision(settings, file)
    if arguments.is_trl(file) and "sharding.activation_checkpointing" not in settings:
        yield Said(
            "gradient_checkpointing", True, "default", {"sharding.activation_checkpointing": "full"}, "TRL's default"
        )
    if arguments.is_trl(file) and file.get("learning_rate") is None:
        yield Said("learning_rate", 2e-5, "default", {"optimizer.lr": 2e-5}, "TRL's default")


DIALECT = Dialect(
    name="the HF Trainer",
    title="Hugging Face Trainer",
    intro=(
        "A JSON or YAML file of TrainingArguments, alone or with the model and data arguments of the scripts that use\n"
        "it. What the file leaves out is as Transformers does it: a learning rate of 5e-5, linear decay, no weight\n"
        "decay, three epochs, fp32, no packing, nothing held out, every checkpoint kept. A file with keys of TRL\n"
        "(`packing`, `use_peft`, `dataset_text_field` and others) is as TRL does it: 2e-5, bf16, activations\n"
        "recomputed, and adapters only with `use_peft: true`."
    ),
    marks=(
        "per_device_train_batch_size",
        "num_train_epochs",
        "per_device_eval_batch_size",
        "lr_scheduler_type",
        "do_train",
        "dataset_text_field",
        "model_name_or_path",
        "adam_beta2",
        "save_total_limit",
        "gradient_checkpointing_kwargs",
        "eval_strategy",
        "save_strategy",
        "optim",
        "ddp_timeout",
        "warmup_ratio",
        "max_grad_norm",
    ),
    prepare=arguments.load_fsdp_config,
    no_adapters=lambda file: (
        "" if file.get("use_peft", file.get("use_lora")) else "use_peft is not on, so TRL trains the whole model"
    ),
    finish=_left_out,
    rows=(
        to("batch.per_device", "per_device_train_batch_size per_gpu_train_batch_size", default=8),
        to("evaluate.per_device", "per_device_eval_batch_size per_gpu_eval_batch_size"),
        reads("duration.steps", arguments.steps, "max_steps", takes=ANY_WHOLE, note="-1: not set"),
        reads("duration.epochs", arguments.epochs, "num_train_epochs", default=3.0, note="max_steps wins"),
        reads("optimizer.kind", arguments.optimizer, "optim"),
        reads("schedule.kind", arguments.schedule, "lr_scheduler_type", default="linear"),
        *arguments.COMMON,
        to("evaluate.at_start", "eval_on_start"),
        to("topology.device=cpu", "use_cpu no_cuda"),
        to("model.path", "model_name_or_path model_name"),
        to("model.tokenizer", "tokenizer_name tokenizer_name_or_path"),
        to("model.revision", "model_revision"),
        to("model.trust_remote_code", "trust_remote_code"),
        to("model.attention", "attn_implementation"),
        reads("precision", arguments.dtype, "torch_dtype dtype"),
        to("model.lora=true", "use_peft use_lora"),
        to("model.lora.r", "lora_r"),
        to("model.lora.alpha", "lora_alpha"),
        to("model.lora.dropout", "lora_dropout", default=0.05),
        reads("model.lora.targets", _targets, "lora_target_modules", takes=TEXTS, default=_TARGETS),
        unused("lora_task_type", "adapters are trained on the layers of model.lora.targets", quiet=("CAUSAL_LM",)),
        refuse(
            "lora_modules_to_save", "modules are either frozen or adapted, never trained beside adapters", unless=([],)
        ),
        reads("data.train", arguments.hub_data, "dataset_name", takes=TEXT, note="a path, or a name on the hub"),
        part_of("dataset_config_name dataset_config dataset_train_split", "dataset_name", takes=TEXT),
        unused("dataset_test_split", "give data.validation a source", quiet=("test",)),
        to("data.train", "train_file dataset_path train_data_path data_path train_data"),
        to("data.validation", "validation_file eval_file val_data_path eval_data_path"),
        reads(
            "data.holdout",
            arguments.holdout,
            "validation_split_percentage",
            takes=number("a number from 0 to below 100", at_least=0, below=100),
            default=0,
        ),
        to("data.encode={kind: text, column: $}", "dataset_text_field text_column_name"),
        to("data.sequence_length", "max_seq_length max_length block_size max_seq_len model_max_length"),
        to("data.pack", "packing", default=False),
        unused(
            "do_train do_eval do_predict",
            "fullshard train trains, and validates if there is data for it",
            quiet=(True, False),
        ),
        reads(
            "data.encode",
            arguments.answers_only,
            "assistant_only_loss completion_only_loss",
            takes=SWITCH,
            note="true: only answers are learned, as always; false: train_on: all",
        ),
        unused(
            "preprocessing_num_workers dataset_num_proc overwrite_cache",
            "data is encoded once and cached by content",
            quiet=(),
        ),
        unused(
            "average_tokens_across_devices",
            "a step is always averaged over the tokens of all ranks",
            quiet=(True,),
        ),
        unused("per_device_batch_size auto_find_batch_size", "`fullshard check` says what fits", quiet=(False,)),
        unused(
            "logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica "
            "logging_dir disable_tqdm include_num_input_tokens_seen include_tokens_per_second project trackio_space_id "
            "trackio_bucket_id trackio_static_space_id skip_memory_metrics debug",
            "the console, log.txt and metrics.jsonl have everything",
            quiet=(True, False, "steps", "passive", "warning", "no", "", "huggingface", []),
        ),
        unused(
            "eval_delay eval_accumulation_steps prediction_loss_only eval_do_concat_batches eval_use_gather_object "
            "batch_eval_metrics bf16_full_eval fp16_full_eval",
            "validation computes as training does, batch by batch",
            quiet=(True, False, 0),
        ),
        unused(
            "save_only_model save_on_each_node save_safetensors enable_jit_checkpoint ignore_data_skip "
            "restore_callback_states_from_checkpoint",
            "a checkpoint always resumes exactly",
            quiet=(True, False),
        ),
        unused("full_determinism data_seed", "the data order follows from `seed`", quiet=(False,)),
        reads(
            "",
            arguments.accelerator,
            "accelerator_config",
            takes=SECTION,
            note="no effect; split_batches is refused",
        ),
        refuse("parallelism_config", "there is no tensor or context parallelism", unless=({},)),
        unused(
            "torch_empty_cache_steps use_cache",
            "activations are freed by themselves; there is no cache in training",
            quiet=(False, True),
        ),
        unused("train_sampling_strategy", "data.shuffle: a new order every epoch", quiet=("random",)),
        unused("local_rank", "the launcher says it: LOCAL_RANK", quiet=(-1, 0)),
        refuse(
            "load_in_4bit load_in_8bit",
            "quantised weights are not trained: model.lora: true keeps frozen weights as stored",
        ),
    ),
)
