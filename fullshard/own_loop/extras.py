"""What a loop of your own saves beside tensors: numbers, texts, lists, dicts, and states of schedulers and scalers.

Written as JSON, never pickled: reading a checkpoint runs no code. What JSON has no form for is tagged. Must not know
checkpoints."""

from __future__ import annotations

import base64
from typing import Any

import torch

from fullshard.errors import SetupError

_TAG = "$"
LARGEST = 2**20
"""The most bytes of one tensor: a generator's state is small, a model's weights are not."""


def encode(value: Any, where: str) -> Any:
    """The value as JSON can hold it; raises with the key path of what it cannot."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": encode(list(value), where)}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith(_TAG) for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {_TAG: "dict", "items": pairs}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value.detach().cpu(), where)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of NumPy
        return encode(value.item(), where)
    raise SetupError(
        f"fullshard.save: {where} is {_a(value)}, which a checkpoint cannot hold. Allowed: numbers, strings, None, "
        "lists, tuples and dicts of these, small tensors, and objects with a state_dict of these, such as a scheduler."
    )


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _encode_tensor(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    if tensor.numel() * tensor.element_size() > LARGEST:
        raise SetupError(
            f"fullshard.save: {where} is a tensor of {tensor.numel():,} values, too large for what is saved beside the "
            "model. Make it a buffer of the model: register_buffer."
        )
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {_TAG: "tensor", "dtype": dtype, "shape": list(tensor.shape), "data": base64.b64encode(data).decode()}


def decode(value: Any) -> Any:
    """The value that was encoded."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind == "tuple":
        return tuple(decode(value["items"]))
    if kind == "dict":
        return {decode(key): decode(item) for key, item in value["items"]}
    if kind == "tensor":
        dtype: torch.dtype = getattr(torch, value["dtype"])
        data = bytearray(base64.b64decode(value["data"]))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    return {key: decode(item) for key, item in value.items()}
