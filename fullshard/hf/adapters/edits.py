"""Edits of a fresh module, before it is sharded: adapters and frozen parameters.

Must not know where weights come from, ranks or objectives.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from fullshard.config.part import did_you_mean
from fullshard.contracts.optimizer import matching_names
from fullshard.errors import RecipeError

logger = logging.getLogger(__name__)

ADAPTER = "default"
"""peft's name of the adapter, which is part of parameter names."""


def add_lora(
    module: nn.Module,
    *,
    r: int,
    alpha: float,
    dropout: float,
    targets: str | list[str],
    base: str | None,
    revision: str | None = None,
    task: str | None = "CAUSAL_LM",
    exclude: Sequence[str] = (),
) -> None:
    """Adds adapters in place: the module keeps its class, base parameters freeze, adapter parameters are on meta.

    Modules in `exclude`, and those inside them, get no adapters. An export names `base` and `revision` as its base."""
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    for target in targets if isinstance(targets, list) else []:
        # peft silently ignores targets that do not exist.
        if not any(name == target or name.endswith(f".{target}") for name, _ in module.named_modules()):
            raise _no_target(module, targets, f"no module is called {target!r}", name=target)
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        task_type=task,
        base_model_name_or_path=base,
        revision=revision,
        exclude_modules=rf"({'|'.join(map(re.escape, exclude))})(\..*)?" if exclude else None,
        # GPT-2's Conv1D stores its matrix transposed.
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in module.modules()),
    )
    try:
        inject(module, config)
    except ValueError as error:
        raise _no_target(module, targets, str(error).splitlines()[0].rstrip(".")) from error


def inject(module: nn.Module, config: Any) -> None:
    """Adds the adapters of a peft config in place; only they are trained. Raises ValueError if nothing fits."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        # peft adds patterns for fused experts itself, and then warns that they are not targeted.
        warnings.filterwarnings("ignore", message=".*_pattern keys did not match any targeted module")
        inject_adapter_in_model(config, module, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _no_target(module: nn.Module, targets: str | list[str], reason: str, *, name: str | None = None) -> RecipeError:
    from transformers.pytorch_utils import Conv1D

    layers = sorted(
        {found.rpartition(".")[2] for found, m in module.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    )
    near = did_you_mean(name or (targets if isinstance(targets, str) else targets[0]), layers)
    return RecipeError(
        f"model.lora.targets = {targets!r} does not fit {type(module).__name__}{near}: {reason}. "
        f"Use all-linear, or names from: {', '.join(layers)}."
    )


def has_adapters(module: nn.Module) -> bool:
    """Whether the module has LoRA adapters."""
    return bool(getattr(module, "peft_config", None))


def adapter_config(module: nn.Module) -> Any:
    """The peft config of the adapters."""
    model: Any = module
    return model.peft_config[ADAPTER]


def freeze(module: nn.Module, patterns: Sequence[str]) -> int:
    """Freezes the parameters that match any pattern (`model.embed_tokens.*`); returns how many tensors."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    frozen = 0
    for index, pattern in enumerate(patterns):
        matching = matching_names(pattern, names, where=f"model.freeze[{index}] = {pattern!r}")
        for name in matching:
            module.get_parameter(name).requires_grad_(False)
        frozen += len(matching)
    return frozen


def base_name(name: str) -> str:
    """The parameter's name before adapters were added."""
    # More than once if several parameters of one module (fused experts) are adapted.
    return re.sub(r"\.base_layer(?=\.)", "", name)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_" in name
