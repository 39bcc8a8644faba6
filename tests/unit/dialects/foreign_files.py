"""Files as users of other trainers write them, each with what it means here."""

from __future__ import annotations

from typing import Any

FSDP1 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: {prefetch}
  fsdp_offload_params: {offload}
  fsdp_sharding_strategy: {strategy}
  fsdp_state_dict_type: {state}
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: {precision}
num_machines: {machines}
num_processes: {processes}
rdzv_backend: static
same_network: true
use_cpu: false
"""


def fsdp1(**changes: Any) -> str:
    values = {
        "prefetch": "false",
        "offload": "false",
        "strategy": "FULL_SHARD",
        "state": "SHARDED_STATE_DICT",
        "precision": "bf16",
        "machines": 1,
        "processes": 2,
    }
    return FSDP1.format(**values | changes)


ACCELERATE: dict[str, tuple[str, dict[str, Any]]] = {
    "version 1, everything sharded": (
        fsdp1(),
        {
            "sharding.strategy": "full",
            "precision": "bf16",
            "topology.devices": 2,
            "topology.nodes": 1,
            "sharding.cpu_offload": False,
            "checkpoint.format": "sharded",
        },
    ),
    "version 1, gradients only": (
        fsdp1(strategy="SHARD_GRAD_OP", precision="fp16"),
        {"sharding.strategy": "grad_op", "precision": "fp16"},
    ),
    "version 1, by number": (fsdp1(strategy=2), {"sharding.strategy": "grad_op"}),
    "version 1, hybrid on two machines": (
        fsdp1(strategy="HYBRID_SHARD", machines=2, processes=16),
        {"sharding.strategy": "hybrid", "topology.nodes": 2, "topology.devices": 8},
    ),
    "version 1, not sharded": (fsdp1(strategy="NO_SHARD", precision="'no'"), {"sharding.strategy": "none"}),
    "version 1, offloaded, whole checkpoints": (
        fsdp1(offload="true", state="FULL_STATE_DICT", prefetch="true"),
        {"sharding.cpu_offload": True, "checkpoint.format": "full", "sharding.forward_prefetch": True},
    ),
    "version 1, the strategy under its new name": (
        fsdp1().replace("fsdp_sharding_strategy: FULL_SHARD", "fsdp_reshard_after_forward: SHARD_GRAD_OP"),
        {"sharding.strategy": "grad_op"},
    ),
    "version 2": (
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_reshard_after_forward: true\n  fsdp_activation_checkpointing: true\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer\n",
        {
            "sharding.strategy": "full",
            "sharding.activation_checkpointing": "full",
            "sharding.wrap.classes": ["Qwen3DecoderLayer"],
            "topology.devices": 4,
        },
    ),
    "version 2, parameters stay gathered": (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_reshard_after_forward: false\n  fsdp_sharding_strategy: FULL_SHARD\n",
        {"sharding.strategy": "grad_op"},
    ),
    "wrapped by size": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 2000\n",
        {"sharding.strategy": "full", "sharding.wrap.min_params": 2000},
    ),
    "one unit": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: NO_WRAP\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n",
        {"sharding.wrap.whole": True},
    ),
    "replicated, named GPUs": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\ngpu_ids: 0,3\nnum_processes: 2\n"
        "mixed_precision: fp16\n",
        {"sharding.strategy": "none", "topology.devices": [0, 3], "precision": "fp16"},
    ),
    "on a CPU": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n"
        "mixed_precision: 'no'\n",
        {"topology.device": "cpu", "topology.devices": 1},
    ),
    "DeepSpeed's section": (
        "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 2\n"
        "  offload_optimizer_device: cpu\n  offload_param_device: none\n  gradient_clipping: 0.5\n"
        "  gradient_accumulation_steps: 4\n  zero3_init_flag: false\n",
        {
            "sharding.strategy": "grad_op",
            "sharding.cpu_offload": True,
            "optimizer.clip": 0.5,
            "batch.accumulate": 4,
            "topology.devices": 8,
        },
    ),
    "compiled": (
        "distributed_type: FSDP\ndynamo_config:\n  dynamo_backend: INDUCTOR\nfsdp_config:\n  fsdp_version: 2\n",
        {"sharding.compile": True, "sharding.strategy": "full"},
    ),
    "with keys that accelerate itself does not know": (
        "distributed_type: FSDP\ncompute_device: gpu\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
        "  fsdp_limit_all_gathers: true\n  fsdp_min_num_params: 1000000\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n",
        {"topology.device": "cuda", "sharding.strategy": "full", "sharding.wrap": None},
    ),
}

TRAINING_ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing but batches": (
        '{"per_device_train_batch_size": 4, "output_dir": "out/first"}',
        {
            "batch.per_device": 4,
            "optimizer.lr": 5e-5,
            "optimizer.weight_decay": 0.0,
            "optimizer.betas": [0.9, 0.999],
            "schedule.kind": "linear",
            "duration.epochs": 3.0,
            "seed": 42,
            "data.holdout": 0.0,
            "data.pack": False,
            "output": "out",
            "name": "first",
        },
    ),
    "steps, cosine with a floor": (
        '{"per_device_train_batch_size": 2, "max_steps": 50, "num_train_epochs": 9, "learning_rate": 1e-4,'
        ' "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}, "warmup_steps": 5,'
        ' "warmup_ratio": 0.5, "gradient_accumulation_steps": 4, "max_grad_norm": 0.0}',
        {
            "duration.steps": 50,
            "duration.epochs": None,
            "schedule.kind": "cosine",
            "schedule.floor": 0.1,
            "schedule.warmup": 5,
            "batch.accumulate": 4,
            "optimizer.clip": None,
        },
    ),
    "FSDP in words": (
        "per_device_train_batch_size: 8\nfsdp: full_shard auto_wrap offload\nbf16: true\n"
        "fsdp_config:\n  transformer_layer_cls_to_wrap: [Qwen3DecoderLayer]\n  backward_prefetch: backward_pre\n"
        "  use_orig_params: true\n  state_dict_type: SHARDED_STATE_DICT\n",
        {
            "sharding.strategy": "full",
            "sharding.cpu_offload": True,
            "precision": "bf16",
            "sharding.wrap.classes": ["Qwen3DecoderLayer"],
            "checkpoint.format": "sharded",
        },
    ),
    "FSDP2 as a switch": (
        "per_device_train_batch_size: 1\nfsdp: true\nfsdp_config:\n  version: 2\n  reshard_after_forward: false\n"
        "  activation_checkpointing: true\n  cpu_offload: false\nadam_beta2: 0.95\noptim: adamw_torch_fused\n",
        {
            "sharding.strategy": "grad_op",
            "sharding.activation_checkpointing": "full",
            "optimizer.betas": [0.9, 0.95],
            "optimizer.kind": "adamw",
        },
    ),
    "when to save, evaluate and log": (
        "num_train_epochs: 2\nsave_strategy: epoch\nsave_steps: 100\neval_strategy: steps\neval_steps: 25\n"
        "logging_steps: 5\nsave_total_limit: 2\nload_best_model_at_end: true\nmetric_for_best_model: eval_loss\n"
        "greater_is_better: false\nreport_to: tensorboard\nper_device_eval_batch_size: 16\n",
        {
            "checkpoint.every_epochs": 1,
            "checkpoint.every_steps": None,
            "evaluate.every_steps": 25,
            "evaluate.every_epochs": None,
            "log.every_steps": 5,
            "checkpoint.keep": 2,
            "checkpoint.export": "best",
            "checkpoint.best.metric": "loss",
            "checkpoint.best.mode": "min",
            "evaluate.per_device": 16,
        },
    ),
    "LoRA and ZeRO": (
        "per_device_train_batch_size: 2\nuse_peft: true\nlora_r: 8\nlora_alpha: 16\nlora_dropout: 0.1\n"
        "lora_target_modules: all-linear\ndeepspeed: ds_zero3.json\nfp16: true\nbf16: false\n"
        "gradient_checkpointing: true\n",
        {
            "model.lora.r": 8,
            "model.lora.alpha": 16,
            "model.lora.dropout": 0.1,
            "model.lora.targets": "all-linear",
            "sharding.strategy": "full",
            "precision": "fp16",
            "sharding.activation_checkpointing": "full",
        },
    ),
    "half precision off": (
        "per_device_train_batch_size: 2\nbf16: false\nfp16: false\nuse_cpu: true\nsave_strategy: 'no'\n",
        {"precision": "fp32", "topology.device": "cpu", "checkpoint.every_epochs": None},
    ),
}

AXOLOTL: dict[str, tuple[str, dict[str, Any]]] = {
    "everything, sharded": (
        "micro_batch_size: 1\ngradient_accumulation_steps: 8\nnum_epochs: 2\nlearning_rate: 2e-5\n"
        "optimizer: adamw_torch\nlr_scheduler: cosine\nsequence_len: 48\nsample_packing: true\nval_set_size: 0.05\n"
        "output_dir: ./outputs/fft\nbf16: auto\nflash_attention: false\nwarmup_steps: 10\nweight_decay: 0.1\n"
        "fsdp: [full_shard, auto_wrap]\nfsdp_config:\n  fsdp_offload_params: true\n"
        "  fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
        "special_tokens:\n  pad_token: <pad>\ntf32: false\nwandb_project:\n",
        {
            "batch.per_device": 1,
            "batch.accumulate": 8,
            "duration.epochs": 2,
            "optimizer.lr": 2e-5,
            "data.sequence_length": 48,
            "data.pack": True,
            "data.holdout": 0.05,
            "output": "outputs",
            "name": "fft",
            "precision": "auto",
            "sharding.strategy": "full",
            "sharding.cpu_offload": True,
            "checkpoint.format": "full",
        },
    ),
    "LoRA": (
        "adapter: lora\nlora_r: 32\nlora_alpha: 16\nlora_dropout: 0.05\nlora_target_linear: true\nmicro_batch_size: 2\n"
        "learning_rate: 2e-4\nnum_epochs: 1\nsequence_len: 32\ngradient_checkpointing: true\nload_in_8bit: false\n"
        "evals_per_epoch: 4\nsaves_per_epoch: 1\nlogging_steps: 1\nbf16: true\n",
        {
            "model.lora.r": 32,
            "model.lora.alpha": 16,
            "model.lora.targets": "all-linear",
            "sharding.activation_checkpointing": "full",
            "precision": "bf16",
            "data.pack": False,
            "data.holdout": 0.0,
            "schedule.kind": "cosine",
        },
    ),
    "ZeRO": (
        "micro_batch_size: 4\nlearning_rate: 1e-5\nsequence_len: 48\ndeepspeed: deepspeed_configs/zero2.json\n"
        "max_steps: 7\nlr_scheduler: constant\nfp16: true\n",
        {"sharding.strategy": "grad_op", "duration.steps": 7, "schedule.kind": "constant", "precision": "fp16"},
    ),
    "FSDP2, what is left out": (
        "fsdp_version: 2\nfsdp_config:\n  offload_params: false\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  reshard_after_forward: true\n  state_dict_type: SHARDED_STATE_DICT\nlearning_rate: 3e-4\n"
        "adam_beta2: 0.95\nmax_grad_norm: 0.5\nwandb_project: mine\nwandb_entity: us\n",
        {
            "sharding.strategy": "full",
            "batch.per_device": 1,
            "duration.epochs": 1,
            "data.sequence_length": 512,
            "optimizer.betas": [0.9, 0.95],
            "optimizer.clip": 0.5,
            "optimizer.weight_decay": 0.0,
        },
    ),
}

DEEPSPEED: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 3, offloaded": (
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},'
        ' "offload_param": {"device": "cpu"}, "overlap_comm": true, "reduce_bucket_size": "auto"},'
        ' "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0},'
        ' "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}',
        {"sharding.strategy": "full", "sharding.cpu_offload": True},
    ),
    "stage 2, numbers": (
        '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,'
        ' "gradient_clipping": 0.3, "bf16": {"enabled": true}, "steps_per_print": 20}',
        {
            "sharding.strategy": "grad_op",
            "batch.per_device": 4,
            "batch.accumulate": 2,
            "optimizer.clip": 0.3,
            "log.every_steps": 20,
        },
    ),
    "stage 1, its own optimizer and schedule": (
        '{"zero_optimization": {"stage": 1}, "train_batch_size": 32, "optimizer": {"type": "AdamW", "params":'
        ' {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.01}}, "scheduler": {"type": "WarmupLR",'
        ' "params": {"warmup_num_steps": 10}}}',
        {
            "sharding.strategy": "grad_op",
            "batch.global": 32,
            "optimizer.lr": 3e-5,
            "optimizer.betas": [0.8, 0.99],
            "schedule.kind": "constant",
            "schedule.warmup": 10,
        },
    ),
    "stage 0, fp16": (
        '{"zero_optimization": {"stage": 0}, "fp16": {"enabled": true, "initial_scale_power": 16},'
        ' "wall_clock_breakdown": false}',
        {"sharding.strategy": "none"},
    ),
}

TORCHTUNE = """
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: MODEL/original/tokenizer.model
  max_seq_len: 2048
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj']
  apply_lora_to_mlp: False
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: MODEL
  checkpoint_files: [model.safetensors]
  recipe_checkpoint: null
  output_dir: MODEL
  model_type: LLAMA3
resume_from_checkpoint: False
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: json
  data_files: DATA
seed: null
shuffle: True
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 32
compile: False
output_dir: out/tuned
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}
log_every_n_steps: 1
log_peak_memory_stats: False
device: cpu
dtype: bf16
enable_activation_checkpointing: False
"""

LLAMA_FACTORY = """
model_name_or_path: MODEL
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity
dataset_dir: DATA
template: llama3
cutoff_len: 2048
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 1800
deepspeed: examples/deepspeed/ds_z3_config.json
"""

TORCHTITAN = """
[job]
dump_folder = "./outputs"
description = "a trial"
[metrics]
log_freq = 3
[model]
name = "llama3"
flavor = "debugmodel"
[optimizer]
name = "AdamW"
eps = 1e-8
[lr_scheduler]
warmup_steps = 2
[training]
local_batch_size = 2
seq_len = 48
max_norm = 1.0
steps = 10
dataset = "mine"
dataset_path = "DATA"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
[checkpoint]
enable = true
interval = 5
async_mode = "disabled"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""

LIGHTNING = """
seed_everything: 7
trainer:
  accelerator: gpu
  devices: 4
  num_nodes: 1
  strategy:
    class_path: lightning.pytorch.strategies.FSDPStrategy
    init_args: {sharding_strategy: SHARD_GRAD_OP, cpu_offload: true}
  precision: bf16-mixed
  max_epochs: 3
  accumulate_grad_batches: 2
  callbacks: []
"""

EMBEDDING = """
model_name: "Qwen/Qwen3-VL-Embedding-8B"
data_path: "data/train.jsonl"
val_data_path: "data/val.jsonl"
output_dir: "output"
batch_size: 16
epochs: 3
use_fsdp: true
gradient_checkpointing: true
use_lora: true
learning_rate: 2.0e-5
"""

STAGED = """
training_stages:
  stage1:
    model: {model_config_key: model_config_1.7B, tokenizer_path: Qwen/Qwen3-1.7B}
    training: {epochs: 1, batch_size: 8, learning_rate: 1e-6, gradient_accumulation_steps: 4, mixed_precision: bf16}
    data: {data_path: a.jsonl}
    distributed:
      strategy: "fsdp"
      num_nodes: 1
      devices: 8
      sync_batchnorm: false
      fsdp:
        enabled: true
        cpu_offload: false
        sharding_strategy: "FULL_SHARD"
        backward_prefetch: "BACKWARD_PRE"
        forward_prefetch: false
        limit_all_gathers: true
        activation_checkpointing: true
        use_orig_params: false
  stage2:
    model: {model_config_key: model_config_1.7B, tokenizer_path: Qwen/Qwen3-1.7B}
    training: {epochs: 2, batch_size: 2, learning_rate: 5e-6, mixed_precision: bf16}
    data: {data_path: b.jsonl}
    distributed:
      strategy: "auto"
      num_nodes: 1
      devices: 4
      fsdp: {enabled: true, cpu_offload: true, sharding_strategy: SHARD_GRAD_OP}
logging: {debug: true, log_file: training.log}
wandb: {use_wandb: true, project: accfiy-fsdp, tags: [fsdp, multi-node]}
distributed_examples:
  single_node_fsdp: {strategy: fsdp, num_nodes: 1, devices: 8}
  multi_node_fsdp: {strategy: fsdp, num_nodes: 4, devices: 8}
"""
