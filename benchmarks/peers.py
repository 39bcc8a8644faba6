"""What other trainers do with the same shapes on one device: torchtitan's model, Transformers with or without peft, HF
Trainer. Random tokens: none of them reads data. Each function returns tokens per second and the peak of memory."""

from __future__ import annotations

import importlib
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

WARMUP = 4
"""Steps that do not count: they compile and allocate."""


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def rows(vocabulary: int, batch: int, length: int) -> Iterator[torch.Tensor]:
    """Random tokens without end, each row one longer than its inputs."""
    draw = torch.Generator(device()).manual_seed(0)
    while True:
        yield torch.randint(vocabulary, (batch, length + 1), device=device(), generator=draw)


def loop(
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    trained: list[nn.Parameter],
    data: Iterator[torch.Tensor],
    steps: int,
) -> dict[str, float]:
    """A plain training loop with fused AdamW and clipping: the median step."""
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    seconds, tokens = [], 0
    for step in range(steps):
        ids = next(data)
        tokens = ids[:, 1:].numel()
        begun = time.perf_counter()
        loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss)  # waits for the device
        seconds.append(time.perf_counter() - begun)
        print(f"peer: step {step + 1}/{steps}, {seconds[-1]:.2f} s, loss {value:.3f}", file=sys.stderr, flush=True)
    return found(tokens, seconds)


def found(tokens: int, seconds: list[float]) -> dict[str, float]:
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {"rate": tokens / statistics.median(seconds[min(WARMUP, len(seconds) - 1) :]), "memory": memory}


def config_of(size: str, *, tiny: bool, architecture: str = "qwen3", **changes: Any) -> Any:
    from fullshard.hf.architecture.sizes import make_config

    return make_config(architecture, "tiny" if tiny else size, changes)


def titan(folder: Path, *, tiny: bool, batch: int, length: int, steps: int, float8: bool) -> dict[str, float]:
    """torchtitan's Qwen3 of 1.7B: FSDP2 with fp32 states, compiled blocks, compiled loss, one document a row. Needs
    torchtitan 0.2.2 with tyro and torchdata."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model_of, args_of = _titan_classes()
    shape: dict[str, Any] = {"dim": 2048, "n_layers": 28, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128}
    shape |= {"hidden_dim": 6144, "vocab_size": 151936, "max_seq_len": length, "enable_weight_tying": True}
    if tiny:
        shape |= {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 48}
        shape |= {"vocab_size": 500}
    init_process_group(
        "nccl" if device() == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    with torch.device("meta"):
        model = model_of(args_of(**shape))
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(emulate=tiny)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "output")
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.layers.values():
        if not tiny:
            block.compile(fullgraph=True)
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    model.to_empty(device=device())
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device()))

    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    criterion = cross_entropy if tiny else torch.compile(cross_entropy)
    try:
        return loop(
            lambda ids: criterion(model(ids[:, :-1]), ids[:, 1:]),
            list(model.parameters()),
            rows(shape["vocab_size"], batch, length),
            steps,
        )
    finally:
        destroy_process_group()


def _titan_classes() -> tuple[Any, Any]:
    """Without the packages around them, which import what only torchtitan's own trainer needs."""
    place = find_spec("torchtitan")
    if place is None or not place.submodule_search_locations:
        raise ImportError("torchtitan is not installed")
    for name in ("torchtitan.models", "torchtitan.models.qwen3"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(place.submodule_search_locations[0], *name.split(".")[1:]))]
        sys.modules[name] = package
    found = importlib.import_module("torchtitan.models.qwen3.model.model")
    return found.Qwen3Model, found.Qwen3ModelArgs


def transformers(
    folder: Path, *, tiny: bool, batch: int, length: int, steps: int, size: str, lora: int | None, recompute: bool
) -> dict[str, float]:
    """Transformers' model in bf16 with compiled blocks; with `lora`, peft's adapters in fp32 under autocast. Where a
    batch does not fit, half of it."""
    from transformers import AutoModelForCausalLM

    config = config_of(size, tiny=tiny)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device()):
        model: Any = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    blocks = list(model.model.layers)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM"))
    for block in blocks if not tiny else ():
        block.compile()
    model.train()

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device(), torch.bfloat16):
            return model(input_ids=ids[:, :-1], labels=ids[:, 1:].contiguous(), use_cache=False).loss  # type: ignore[no-any-return]

    trained = [p for p in model.parameters() if p.requires_grad]
    while True:
        try:
            return loop(loss_of, trained, rows(config.vocab_size, batch, length), steps) | {"batch": batch}
        except torch.cuda.OutOfMemoryError:
            if batch == 1:
                raise
            batch //= 2
            print(f"peer: out of memory, next with a batch of {batch}", file=sys.stderr, flush=True)
            model.zero_grad()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def hf_trainer(
    folder: Path, *, tiny: bool, batch: int, length: int, steps: int, architecture: str, changes: dict[str, Any]
) -> dict[str, float]:
    """HF Trainer with its defaults, bf16 and fused AdamW. Also the seconds from the start of the process to the end of
    the first step."""
    import psutil  # type: ignore[import-untyped]
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    model = AutoModelForCausalLM.from_config(config_of("tiny", tiny=True, architecture=architecture, **changes))
    ids = torch.randint(model.config.vocab_size, (batch * steps, length), generator=torch.Generator().manual_seed(0))
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.time())

    settings = TrainingArguments(
        output_dir=str(folder / "hf"),
        per_device_train_batch_size=batch,
        max_steps=steps,
        bf16=True,
        use_cpu=device() == "cpu",
        optim="adamw_torch_fused",
        save_strategy="no",
        report_to=[],
        logging_steps=10,
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    Trainer(model=model, args=settings, train_dataset=data, callbacks=[Clock()]).train()
    seconds = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return found(batch * length, seconds) | {"first": ends[0] - psutil.Process().create_time()}
