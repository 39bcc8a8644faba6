"""Real errors of dtypes, gradients and loss scaling. Each function is named after the entry that must recognise it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.explain.process_group import alone

CPU = torch.device("cpu")


def mixed_dtypes__in_the_loss() -> None:
    weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
    F.huber_loss(weight, torch.zeros(2, dtype=torch.float32)).backward()


def mixed_dtypes__in_a_linear_layer() -> None:
    nn.Linear(2, 2, dtype=torch.bfloat16)(torch.ones(1, 2))


def mixed_dtypes__in_a_norm() -> None:
    nn.LayerNorm(2, dtype=torch.float64)(torch.ones(1, 2))


def mixed_dtypes__in_attention() -> None:
    query, key = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4, dtype=torch.bfloat16)
    F.scaled_dot_product_attention(query, key, key)


def mixed_dtypes__in_a_product() -> None:
    torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.bfloat16)


def mixed_dtypes__in_a_batched_product() -> None:
    torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2, dtype=torch.bfloat16))


def mixed_dtypes__in_an_index() -> None:
    torch.zeros(2)[torch.tensor([0])] = torch.ones(1, dtype=torch.bfloat16)


def mixed_dtypes__in_a_convolution() -> None:
    nn.Conv1d(2, 2, 1, dtype=torch.bfloat16)(torch.zeros(1, 2, 3))


def unscale_fp16() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)


def unscale_without_gradients() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def dtype_not_implemented() -> None:
    torch.linalg.cholesky(torch.eye(2, dtype=torch.bfloat16))


def fsdp1_uniform_dtype() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with alone():
        FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2)), device_id=CPU)


def fsdp1_uniform_requires_grad() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    with alone():
        FullyShardedDataParallel(model, use_orig_params=False, device_id=CPU)


def fsdp2_uniform_dtype() -> None:
    from torch.distributed.fsdp import fully_shard

    with alone():
        model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2))
        fully_shard(model)
        model(torch.ones(1, 2, dtype=torch.bfloat16))


def recompute_differs__other_dtype() -> None:
    model, calls = nn.Linear(2, 2), []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=len(calls) > 1):
            return F.relu(model(x)).float()

    checkpoint(block, torch.ones(1, 2, requires_grad=True), use_reentrant=False).sum().backward()


def recompute_differs__other_count() -> None:
    calls: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.sin() if len(calls) > 1 else x.sin().sin()

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


def flash_attention_dtype() -> str:
    """On a CPU the kernel takes float32 as well, and says the same of integers as a GPU's does of float32."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = torch.ones(1, 1, 4, 8, dtype=torch.int32)
    with warnings.catch_warnings(record=True) as said, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        warnings.simplefilter("always")
        with contextlib.suppress(RuntimeError):
            nn.functional.scaled_dot_product_attention(query, query, query)
    return "\n".join(str(warning.message) for warning in said)


def use_reentrant() -> str:
    from torch.utils.checkpoint import checkpoint

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        checkpoint(torch.sin, torch.ones(1, requires_grad=True))
    return "\n".join(str(warning.message) for warning in said)


def nothing_requires_grad() -> str:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        checkpoint(nn.Linear(2, 2), torch.ones(1, 2), use_reentrant=True)
    return "\n".join(warnings.formatwarning(w.message, w.category, w.filename, w.lineno) for w in heard)


def no_graph() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()


def backward_twice() -> None:
    loss = nn.Linear(2, 2)(torch.ones(1, 2)).pow(2).sum()
    loss.backward()
    loss.backward()


def changed_in_place() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y += 1
    y.sum().backward()


def empty_parameter_list() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def not_finite__gradient_norm() -> None:
    weight = nn.Parameter(torch.ones(2))
    (weight * float("inf")).sum().backward()
    nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def not_finite__autograd() -> None:
    with torch.autograd.detect_anomaly():
        x = torch.zeros(1, requires_grad=True)
        (torch.sqrt(x) * 0).sum().backward()


def not_finite__in_a_run(folder: Path) -> None:
    """The guard of a run whose loss overflows."""
    from tests.small import model_folder, recipe, token_file, train

    model_folder(folder / "model")
    token_file(folder / "train.jsonl", records=16)
    train(recipe(folder, optimizer={"lr": 1e30, "clip": None}, duration={"steps": 4}))


def not_finite__at_the_first_update(folder: Path) -> None:
    """The guard of the first update, where the loss is not a number."""
    from tests.small import model_folder, recipe, token_file, train

    model_folder(folder / "model")
    token_file(folder / "train.jsonl", records=16)
    train(recipe(folder, objective={"kind": "tests.dist.failing_objectives.NotANumber"}))


def cache_with_checkpointing__asked_for() -> str:
    return _trained_with_checkpointing(use_cache=True)


def cache_with_checkpointing__handed_in() -> str:
    from transformers import DynamicCache

    return _trained_with_checkpointing(use_cache=False, past_key_values=DynamicCache())


def _trained_with_checkpointing(**keywords: Any) -> str:
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging as transformers_logging

    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    transformers_logging.warning_once.cache_clear()  # said once in a process
    model.gradient_checkpointing_enable()
    with heard("transformers") as log:
        model.train()(input_ids=torch.tensor([[1, 2]]), **keywords)
    return log.getvalue()


class heard:
    """What a library logs while it is open."""

    def __init__(self, name: str) -> None:
        self._logger, self._stream = logging.getLogger(name), io.StringIO()
        self._handler = logging.StreamHandler(self._stream)

    def __enter__(self) -> io.StringIO:
        self._logger.addHandler(self._handler)
        return self._stream

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self._handler)
