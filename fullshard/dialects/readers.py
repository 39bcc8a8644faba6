"""Readers that several dialects share: keys of FSDP, files of DeepSpeed, lists of data sets, warm-up, trackers.

Must not know the recipe.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.dialects.kinds import LIST, SECTION, SWITCH, TEXT, Kind, is_off, one_of
from fullshard.dialects.rows import File, Outcome, Reader, Settings, ignored, refused
from fullshard.dialects.words import our_word
from fullshard.errors import RecipeError
from fullshard.formatting.yaml_text import shown

EXCLUSIVE = (("duration.epochs", "duration.steps"), ("batch.accumulate", "batch.global"))
"""Keys of ours that exclude each other."""
FSDP = SWITCH | TEXT | LIST
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
POLICY = one_of(*_POLICIES) | Kind((), (lambda value: dict(zip("012", _POLICIES, strict=True)).get(shown(value)),))
"""By name, or by accelerate's number."""
OFF = Kind(("none",), (lambda value: False if is_off(value) else None,))
INTERVAL = one_of("no", "epoch", "steps", "best") | Kind((), (lambda value: "no" if is_off(value) else None,))
"""When to save or to evaluate; YAML reads a bare `no` as false."""
DEEPSPEED = OFF | Kind(("the path of a DeepSpeed file",), TEXT.readers) | SECTION
DATA_SUFFIXES = (".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet")


def fsdp_words(value: Any, file: File) -> Outcome | Settings:
    """`full_shard auto_wrap offload`, as one text or a list; true is full."""
    if value is False or value == []:
        return ignored("")
    if value is True:
        return {"sharding.strategy": "full"}
    words = [shown(word).lower() for word in (value if isinstance(value, list) else value.split())]
    settings: Settings = {"sharding.cpu_offload": True} if "offload" in words else {}
    for word in words:
        ours = our_word("sharding.strategy", word)
        if ours:
            settings = {"sharding.strategy": ours, **settings}
        elif word not in ("offload", "auto_wrap"):
            return refused(f"{word} is not an FSDP strategy. Known: full_shard, shard_grad_op, hybrid_shard, no_shard.")
    return settings


def wrap_classes(value: Any, file: File) -> Outcome | Settings:
    """Class names to wrap; without effect under a policy that wraps otherwise."""
    policy = _fsdp(file, "auto_wrap_policy") or "TRANSFORMER_BASED_WRAP"
    if policy != "TRANSFORMER_BASED_WRAP":
        return ignored(f"auto_wrap_policy is {policy}, which does not look at classes")
    return {"sharding.wrap.classes": value}


def wrap_policy(value: Any, file: File) -> Outcome | Settings:
    """What the policy wraps; the next two keys say which classes or which size."""
    if value == "SIZE_BASED_WRAP":
        return {"sharding.wrap.min_params": _fsdp(file, "min_num_params") or 100_000_000}
    if value == "NO_WRAP":
        return {"sharding.wrap.whole": True}
    named = _fsdp(file, "transformer_layer_cls_to_wrap")
    return ignored("" if named else "the model's own blocks are found by structure, and wrapped")


def min_params(value: Any, file: File) -> Outcome | Settings:
    """Only size-based wrapping has a smallest size."""
    policy = _fsdp(file, "auto_wrap_policy") or ""
    if policy == "SIZE_BASED_WRAP" or (not policy and value):
        return {"sharding.wrap.min_params": value} if value else ignored("")
    return ignored(f"only SIZE_BASED_WRAP has a smallest size, and auto_wrap_policy is {policy or 'not set'}")


def reshard_after_forward(value: Any, file: File) -> Outcome | Settings:
    """FSDP2's switch, or the name of a strategy in files for FSDP1."""
    if isinstance(value, bool):
        return {"sharding.strategy": "full" if value else "grad_op"}
    return sharding_strategy(value, file)


def sharding_strategy(value: Any, file: File) -> Outcome | Settings:
    """A strategy by name, or by accelerate's number for it; FSDP2 files have reshard_after_forward instead."""
    if str(_fsdp(file, "version")) == "2" and _fsdp(file, "reshard_after_forward") is not None:
        return ignored("fsdp_version is 2, where fsdp_reshard_after_forward decides")
    numbers = {"1": "full", "2": "grad_op", "3": "none", "4": "hybrid", "5": "hybrid"}
    ours = numbers.get(value) or our_word("sharding.strategy", value)
    if ours is None:
        return refused(f"{value} is not a strategy. Known: FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD.")
    why = {"none": "FSDP2 has no NO_SHARD: the model is replicated, as with DDP"}.get(ours, "")
    if value.upper().endswith("ZERO2") or value == "5":
        why = "within a node parameters are gathered again for the backward pass, as with HYBRID_SHARD"
    return Outcome({"sharding.strategy": ours}, why=why)


def _fsdp(file: File, key: str) -> Any:
    """A key of an FSDP section, with and without its prefix."""
    for path in (f"fsdp_config.fsdp_{key}", f"fsdp_config.{key}", f"fsdp_{key}"):
        if (found := file.get(path)) is not None:
            return found
    return None


def deepspeed(value: Any, file: File) -> Outcome | Settings:
    """DeepSpeed's settings: in place, or in a file that is read; of a file that is not there, its name may tell."""
    if value is False:
        return ignored("")
    inner = value if isinstance(value, Mapping) else json_beside(value, file)
    if isinstance(inner, Mapping):
        from fullshard.dialects.tables import deepspeed as table
        from fullshard.dialects.translate import translate

        done = translate(table.DIALECT, inner, folder=file.folder)
        problems = [f"{said.key}: {said.why}" for said in done.said if said.verdict == "refused"]
        return refused("; ".join(problems)) if problems else Outcome(done.settings, why="what the file says")
    stage = re.search(r"(?:zero|stage|_z)_?-?([0123])", str(value).lower())
    if stage is None:
        return refused(f"{value} cannot be read, and its name does not say the ZeRO stage. Write sharding.strategy.")
    settings = stage_settings(int(stage[1]))
    if "offload" in str(value).lower():
        settings["sharding.cpu_offload"] = True
    return Outcome(settings, why=f"{value} is not here; its name says ZeRO stage {stage[1]}")


def stage_settings(stage: int) -> Settings:
    """What a ZeRO stage is here."""
    return {"sharding.strategy": {0: "none", 1: "grad_op", 2: "grad_op", 3: "full"}[stage]}


def json_beside(name: str, file: File) -> Any:
    """The content of a JSON file that another file names, or None if there is no such file."""
    for path in (file.folder / name, file.folder.parent / name, Path(name)):
        if path.is_file():
            try:
                return json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise RecipeError(f"{path} cannot be read as JSON: {error}.") from None
    return None


def dataset(name: str, *, split: str | None = None, config: str | None = None) -> Any:
    """A data set by the name that other trainers use for both: a path here, or else a name on the hub."""
    local = os.path.exists(os.path.expanduser(name)) or name.endswith(DATA_SUFFIXES) or name.startswith((".", "/", "~"))
    if local or name.count("/") > 1:
        return {"kind": "files", "path": name, "split": split} if split and os.path.isdir(name) else name
    more = {"config": config, "split": split}
    return {"kind": "hub", "name": name, **{key: value for key, value in more.items() if value is not None}}


def mixture(sources: list[Any]) -> str:
    """Why several data sets are refused that are not all files, and what to write: how much of each is not known."""
    percent = 100 / len(sources)
    parts = ", ".join(f"{{source: {json.dumps(source)}, percent: {percent:.4g}}}" for source in sources)
    return f"several data sets are mixed by percentage: write data.train: {{kind: mixture, parts: [{parts}]}}"


def warmup(value: Any, file: File) -> Outcome | Settings:
    """Steps, or a share of the run."""
    other = file.get("warmup_steps")
    if other and other != value:
        return ignored("warmup_steps is set, and wins" if value else "")
    if value and file.get("lr_scheduler_type", file.get("lr_scheduler")) == "constant":
        return ignored("constant has no warm-up there; constant_with_warmup has")
    return {"schedule.warmup": value}


def beta(place: int, *, others: tuple[float, float] = (0.9, 0.999)) -> Reader:
    """One of Adam's two decay rates; the other has its value in the file, or else that of `others`."""

    def read(value: Any, file: File) -> Settings:
        pair = [file.get("adam_beta1", others[0]), file.get("adam_beta2", others[1])]
        pair[place] = value
        return {"optimizer.betas": pair}

    return read


def interval(section: str, steps_key: str, *, default: int) -> Reader:
    """`no`, `epoch` or `steps`: when to save or to evaluate."""

    def read(value: Any, file: File) -> Settings:
        every = file.get(steps_key, default)
        found = {"epoch": {"every_epochs": 1}, "steps": {"every_steps": every, "every_epochs": None}, "best": {}}
        chosen = found.get(value, {"every_epochs": None})
        return {f"{section}.{key}": setting for key, setting in chosen.items()}

    return read


def every_steps(section: str, strategy_key: str, *, default: str) -> Reader:
    """An interval in steps, in force only if the strategy counts steps."""

    def read(value: Any, file: File) -> Outcome | Settings:
        strategy = file.get(strategy_key) or default
        if strategy != "steps":
            return ignored(f"{strategy_key} is {strategy}")
        if 0 < value < 1:
            return refused(f"{shown(value)} of the run is not an interval here: write {section}.every_steps in steps")
        return {f"{section}.every_steps": value, f"{section}.every_epochs": None}

    return read


def trackers(value: Any, file: File) -> Outcome | Settings:
    """Names of trackers: tensorboard and wandb are here."""
    names = ["tensorboard", "wandb"] if "all" in value else [name for name in value if name != "none"]
    unknown = [name for name in names if name not in ("tensorboard", "wandb")]
    if unknown:
        return ignored(f"{unknown[0]} is not available: metrics.jsonl in the run folder has every number")
    return {"log.sinks": names}
