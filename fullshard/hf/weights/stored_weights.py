"""Reads stored tensors in row slices, under the module's own parameter names; strict both ways.

No rank ever reads a whole model: a plain tensor is read slice by slice, and where Transformers stores a parameter in
another form (experts one by one), one parameter at a time is converted. Must not know ranks or what is trained.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.contracts.model import Weights
from fullshard.errors import CheckpointError
from fullshard.hf.adapters.edits import base_name, is_adapter
from fullshard.hf.scalars import is_scalar
from fullshard.hf.weights.safetensors_folder import Stored, open_folder

_IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|position_ids$")
"""Buffers that older versions of Transformers stored and newer ones compute."""


class StoredWeights:
    """Stored tensors of a model without its adapters, checked against one module: complete, nothing unexpected,
    equal shapes.

    `resized` allows another number of rows in the embedding and the head: old rows are exact, rows beyond the stored
    ones are the mean of the stored rows. `own_names`: names that the module has are stored unchanged. `may_miss` says
    which of the module's names need not be stored. `headless`: the module is the backbone of the stored model, whose
    heads are not read.
    """

    def __init__(
        self,
        stored: Stored,
        module: nn.Module,
        *,
        place: Path | str,
        advice: str,
        resized: bool = False,
        own_names: bool = False,
        may_miss: Callable[[str], bool] = lambda name: False,
        headless: bool = False,
    ) -> None:
        self._place, self._advice = place, advice
        self._headless = headless
        self._module = module
        self._stored = stored
        self._own_names, self._may_miss = own_names, may_miss
        names = [name for name in module.state_dict(keep_vars=True) if not is_adapter(name) and not is_scalar(name)]
        self._targets = {base_name(name): name for name in names}
        self._shapes = {n: tuple(t.shape) for n, t in module.state_dict(keep_vars=True).items()}
        self._resizable = _vocabulary_names(module) if resized else set()
        self._plain: dict[str, str] = {}
        self._converted: dict[str, _Conversion] = {}
        unexpected = self._map_names()
        self._share_tied()
        self._check(unexpected)
        self._means: dict[str, torch.Tensor] = {}
        self._last: tuple[int, dict[str, torch.Tensor]] | None = None

    def names(self) -> set[str]:
        """The module's parameter and buffer names that are stored; every name of a tied tensor is one."""
        return {*self._plain, *self._converted}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of one tensor; a 0-d tensor is whole."""
        if stop <= start and self._shapes[name]:
            return torch.empty(0, *self._shapes[name][1:], dtype=self._dtype(name))
        if name in self._converted:
            return self._read_converted(name, start, stop)
        source = self._plain[name]
        shape = self._stored[source].shape
        if not shape:
            return self._stored.read(source)
        rows = self._stored.read(source, start, min(stop, shape[0]))
        if stop <= shape[0]:
            return rows
        new = self._mean(source).to(rows.dtype).expand(stop - max(start, shape[0]), *shape[1:])
        return torch.cat([rows, new])

    def _dtype(self, name: str) -> torch.dtype:
        source = self._plain.get(name) or next(iter(self._converted[name].sources.values()))[0]
        return self._stored[source].dtype

    def _map_names(self) -> list[str]:
        """Finds the parameter behind every stored name, by Transformers' own rules; returns the other names."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        model: Any = self._module
        transforms = get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        prefix = model.base_model_prefix
        # Transformers asks this mapping for a value, not only for the key.
        known = dict.fromkeys(self._targets, True)
        unexpected = []
        groups: dict[str, _Conversion] = {}
        for source in sorted(self._stored, key=dot_natural_key):
            target, pattern = source, None
            if not (self._own_names and source in known):
                target, pattern = rename_source_key(source, renamings, converters, prefix, known)
            if target not in known:
                target, pattern = rename_source_key(source, [], [], prefix, known)
            if target not in known or (pattern is None and self._targets[target] in self._plain):
                unexpected.append(source)
            elif pattern is None:
                self._plain[self._targets[target]] = source
            else:
                group = groups.setdefault(target, _Conversion(target, by_pattern[pattern]))
                group.sources.setdefault(pattern, []).append(source)
        for group in groups.values():
            self._plan_conversion(group)
        if not self._own_names:
            # What Transformers' own export reverses: the transforms that matched something here.
            model._weight_conversions = [t for t in transforms if t.was_used()]
        return unexpected

    def _plan_conversion(self, group: _Conversion) -> None:
        """Learns from meta tensors which parameters a conversion gives, and their shapes."""
        for name, shape in group.outputs(self._stored, self._module).items():
            target = self._targets.get(name)
            if target is None or self._shapes[target] != shape:
                expected = list(self._shapes[target]) if target else "nothing"
                raise CheckpointError(
                    f"{self._place}: Transformers' conversion for {self._kind()} gives {name} {list(shape)}, where "
                    f"{type(self._module).__name__} has {expected}. "
                    "Load and save the model once with AutoModelForCausalLM, and use that folder."
                )
            self._converted[target] = group

    def _read_converted(self, name: str, start: int, stop: int) -> torch.Tensor:
        group = self._converted[name]
        target = base_name(name)
        if group.by_expert:
            return group.convert(self._stored, self._module, rows=slice(start, stop))[target]
        # Parameters that come out of one conversion are read one after the other: keep the last one.
        if self._last is None or self._last[0] != id(group):
            self._last = None
            self._last = (id(group), group.convert(self._stored, self._module))
        return self._last[1][target][start:stop]

    def _share_tied(self) -> None:
        for group in _tied_groups(self._module):
            found = [n for n in group if n in self._plain]
            if not found:
                continue
            if len({self._plain[n] for n in found}) > 1:
                self._check_equal([self._plain[n] for n in found])
            for name in group:
                self._plain[name] = self._plain[found[0]]

    def _check_equal(self, sources: list[str]) -> None:
        """Two stored tensors for one tied parameter must agree; compares a sample of rows."""
        rows = min(self._stored[s].shape[0] for s in sources)
        for row in range(0, rows, max(rows // 16, 1)):
            first, *rest = (self._stored.read(s, row, row + 1) for s in sources)
            if any(not torch.equal(first, other) for other in rest):
                raise CheckpointError(
                    f"{self._place}: {' and '.join(sources)} are stored with different values (row {row}), but the "
                    "config ties them. Set model.overrides.tie_word_embeddings to false to train both."
                )

    def _check(self, unexpected: list[str]) -> None:
        model: Any = self._module
        may_miss = _patterns(model, "_keys_to_ignore_on_load_missing")
        may_exceed = [_IGNORED, *_patterns(model, "_keys_to_ignore_on_load_unexpected")]
        have = self.names()
        missing = [n for b, n in self._targets.items() if n not in have and not any(p.search(b) for p in may_miss)]
        check_names(
            f"{self._place} does not hold the weights of {type(self._module).__name__} ({self._kind()})",
            missing=[name for name in missing if not any(map(self._may_miss, self._aliases(name)))],
            extra=[n for n in unexpected if not any(p.search(n) for p in may_exceed) and not self._is_head(n)],
            shapes={
                name: (found, self._shapes[name])
                for name, source in self._plain.items()
                if not self._fits(name, found := self._stored[source].shape)
            },
            advice=self._advice,
        )

    def _is_head(self, name: str) -> bool:
        """Whether a stored tensor belongs to what sits on top of the backbone."""
        model: Any = self._module
        inside = f"{model.base_model_prefix}."
        return self._headless and any(source.startswith(inside) for source in self._stored) != name.startswith(inside)

    def _aliases(self, name: str) -> list[str]:
        return next((group for group in _tied_groups(self._module) if name in group), [name])

    def _fits(self, name: str, found: tuple[int, ...]) -> bool:
        shape = self._shapes[name]
        # A sharded scalar is kept, and stored, as a vector of one.
        return found == shape or (name in self._resizable and found[1:] == shape[1:]) or (not shape and found == (1,))

    def _mean(self, source: str) -> torch.Tensor:
        """The mean row, summed in pieces so that the whole tensor is never in memory."""
        if source not in self._means:
            rows, *rest = self._stored[source].shape
            total = torch.zeros(rest, dtype=torch.float64)
            for start in range(0, rows, 8192):
                total += self._stored.read(source, start, min(start + 8192, rows)).double().sum(0)
            self._means[source] = total / rows
        return self._means[source]

    def _kind(self) -> str:
        model: Any = self._module
        return f"model type {model.config.model_type}"


class SafetensorsWeights(StoredWeights):
    """The weights in one folder that Transformers or a hub wrote."""

    def __init__(self, folder: Path, module: nn.Module, *, resized: bool = False, headless: bool = False) -> None:
        advice = "Check that config.json belongs to these weights and that model.overrides changes no shape."
        # The pooler of an encoder is left out by models that were trained without it; an embedding has no use for it.
        # Modules after the pooling have their own folders.
        apart = _stored_apart(module) if headless else ()
        stored = open_folder(folder)
        super().__init__(
            stored,
            module,
            place=folder,
            advice=advice,
            resized=resized,
            may_miss=lambda name: name.startswith(apart),
            headless=headless,
        )


def _stored_apart(module: nn.Module) -> tuple[str, ...]:
    """Prefixes of what a headless model's own files may lack: its pooler, and parts that are stored elsewhere."""
    marked = [f"{name}." for name, part in module.named_modules() if getattr(part, "stored_apart", False)]
    return "pooler.", *marked


class NamedWeights:
    """Stored tensors by parameter name, checked against `shapes`: complete, nothing unexpected, equal shapes.

    `names`: parameter name -> stored name. `what` and `advice` begin and end the error message."""

    def __init__(
        self,
        stored: Stored,
        names: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        what: str,
        advice: str,
    ) -> None:
        self._stored, self._names = stored, {name: names[name] for name in shapes if names.get(name) in stored}
        check_names(
            what,
            missing=[names.get(name, name) for name in shapes if name not in self._names],
            extra=sorted(set(stored) - set(self._names.values())),
            shapes={
                source: (stored[source].shape, shapes[name])
                for name, source in self._names.items()
                if stored[source].shape != shapes[name]
            },
            advice=advice,
        )

    def names(self) -> set[str]:
        return set(self._names)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._stored.read(self._names[name], start, stop)

    def whole(self, name: str) -> torch.Tensor:
        return self._stored.read(self._names[name])


def adapter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters() if is_adapter(name)}


class FirstOf:
    """Several sources of values as one; the first that has a name provides its values."""

    def __init__(self, *sources: Weights) -> None:
        self._owner = {name: source for source in reversed(sources) for name in source.names()}

    def names(self) -> set[str]:
        return set(self._owner)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._owner[name].read(name, start, stop)


def check_names(
    what: str,
    *,
    missing: Sequence[str],
    extra: Sequence[str],
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    advice: str,
) -> None:
    """Raises what does not fit, the first names of each kind; `shapes`: the stored one and the model's."""
    wrong = [f"{name} {list(found)} (the model has {list(needed)})" for name, (found, needed) in shapes.items()]
    problems = {"missing": missing, "not part of the model": extra, "of another shape": wrong}
    if any(problems.values()):
        found_problems = "; ".join(f"{len(v)} {k}: {_some(v)}" for k, v in problems.items() if v)
        raise CheckpointError(f"{what}: {found_problems}. {advice}")


class _Conversion:
    """Stored tensors that together become one or more parameters, by a converter of Transformers."""

    def __init__(self, target: str, converter: Any) -> None:
        from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

        self.target = target
        self.sources: dict[str, list[str]] = {}
        self._converter = converter
        first, *rest = converter.operations
        # Stacked experts: rows of the parameter are experts, so only the experts asked for need to be read.
        self.by_expert = (isinstance(first, MergeModulelist) and first.dim == 0) and all(
            (isinstance(op, Concatenate) and op.dim > 0)
            or (isinstance(op, Transpose) and min(op.dim0, op.dim1) > 0 and not op.check_dims)
            for op in rest
        )

    def outputs(self, stored: Stored, module: nn.Module) -> dict[str, tuple[int, ...]]:
        empty = {
            pattern: [torch.empty(stored[s].shape, device="meta") for s in sources]
            for pattern, sources in self.sources.items()
        }
        return {name: tuple(tensor.shape) for name, tensor in self._run(empty, module).items()}

    def convert(self, stored: Stored, module: nn.Module, *, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        """The parameters; with `rows`, those experts only."""
        return self._run({p: [stored.read(s) for s in sources[rows]] for p, sources in self.sources.items()}, module)

    def _run(self, tensors: dict[str, list[torch.Tensor]], module: nn.Module) -> dict[str, torch.Tensor]:
        model: Any = module
        converter = copy.deepcopy(self._converter)
        for pattern, found in tensors.items():
            for tensor in found:
                converter.add_tensor(self.target, self.target, pattern, tensor)
        try:
            made = converter.convert(self.target, model=model, config=model.config)
        except Exception as error:
            raise CheckpointError(
                f"model type {model.config.model_type}: {self.target} cannot be converted from its stored form "
                f"({type(error).__name__}: {error}). "
                "Load and save the model once with AutoModelForCausalLM, and use that folder."
            ) from error
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


def _tied_groups(module: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _vocabulary_names(module: nn.Module) -> set[str]:
    """Names of the tensors with one row per token."""
    model: Any = module
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    tensors = {id(t) for layer in layers if layer is not None for t in layer.parameters()}
    return {n for n, p in module.named_parameters(remove_duplicate=False) if id(p) in tensors and not is_adapter(n)}


def _patterns(model: Any, attribute: str) -> list[re.Pattern[str]]:
    return [re.compile(p) for p in getattr(model, attribute, None) or ()]


def _some(names: Iterable[str], *, limit: int = 6) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
