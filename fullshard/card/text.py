"""The text of a model card: YAML front matter for the Hub, then Markdown. Must not know where facts come from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fullshard.card import facts
from fullshard.card.facts import Base, Exported
from fullshard.card.load_code import load_code
from fullshard.formatting import readable
from fullshard.formatting.plural import counted, join_words

LICENCE = "# license: fill this in before you publish, for example apache-2.0"
MOST_FILES = 20
"""Files of the training data that are listed one by one."""
_FORMS = {
    "whole": "a whole model",
    "adapter": "LoRA adapters, without their base model",
    "merged": "a whole model with trained LoRA adapters added to its weights",
}


def card(exported: Exported, folder: Path) -> str:
    """The card of what `folder` holds."""
    base = facts.base_of(exported, folder)
    line = exported.family.load_with(".", adapter=exported.form == "adapter")
    code = load_code(line, folder, place=".") if line else None
    sections = {
        "How to load": _load(code),
        "Training data": _data(exported),
        "Recipe": _recipe(exported),
        "Results": _results(exported),
        "Software": f"Written with {join_words(facts.versions())}.",
        "Licence": "To be filled in by whoever publishes this model"
        + (", in accordance with the licence of the base model." if base.name else "."),
    }
    name = plain(str(exported.recipe.get("name") or "model"))
    body = [f"# {name}", _what(exported, base), *(f"## {title}\n\n{text}" for title, text in sections.items())]
    return f"---\n{_front(exported, base, code)}---\n\n" + "\n\n".join(body) + "\n"


def plain(value: Any) -> str:
    """Text in which nothing is markup, on one line."""
    text = " ".join(readable.plain(str(value)).split())
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)


def _front(exported: Exported, base: Base, code: str | None) -> str:
    values: dict[str, Any] = {}
    if code:
        values["library_name"] = _library(code)
    if base.on_hub:
        values |= {"base_model": base.name, "base_model_relation": _relation(exported.form)}
    if names := facts.hub_datasets(exported.recipe):
        values["datasets"] = names
    values["tags"] = ["fullshard", *(["lora"] if exported.form != "whole" else [])]
    return f"{LICENCE}\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}"


def _relation(form: str) -> str:
    return "adapter" if form == "adapter" else "finetune"


def _library(code: str) -> str:
    """The name by which the Hub knows the library of the first import."""
    return code.removeprefix("import ").split("\n")[0].split(",")[0].partition(".")[0].replace("_", "-")


def _what(exported: Exported, base: Base) -> str:
    total, adapters = facts.parameters(exported)
    weights = "averaged weights" if exported.averaged else "weights"
    made = exported.progress.get("step")
    of = f" of {made:,}" if isinstance(made, int) and made != exported.step else ""
    counts = readable.count(total)
    if adapters:
        counts = f"{readable.count(total - adapters)} in the base, {readable.count(adapters)} in adapters"
    return (
        f"This is {_FORMS[exported.form]}, with the {weights} of step {exported.step:,}{of}. "
        f"{_origin(exported, base)}\n\nNumber of parameters: {counts}."
    )


def _origin(exported: Exported, base: Base) -> str:
    model = exported.model
    if base.on_hub:
        return f"Training started from [{plain(base.name)}](https://huggingface.co/{base.name})."
    if base.name:
        return f"Training started from `{_code(base.name)}`, which is not on the Hub under this name."
    built = ", ".join(plain(model[key]) for key in ("architecture", "size") if model.get(key))
    return f"Training started from random weights{f' ({built})' if built else ''}."


def _load(code: str | None) -> str:
    if code is None:
        return (
            "No other library can load these files on their own: the base model is a checkpoint of fullshard. Write a "
            "whole model with `fullshard export RUN OUT --as merged`."
        )
    return (
        f"Run this in the folder of this file, or put the name of the model on the Hub in place of `'.'`:\n\n"
        f"{_fenced(code, 'python')}"
    )


def _data(exported: Exported) -> str:
    files = exported.state.get("data")
    files = files if isinstance(files, Mapping) else {}
    rows = [
        (plain(facts.public(str(name))), f"{int(entry.get('records') or 0):,}", _size(entry.get("size_bytes")))
        for name, entry in list(files.items())[:MOST_FILES]
        if isinstance(entry, Mapping)
    ]
    parts = [_table(("data", "records", "size"), rows)] if rows else []
    if len(files) > MOST_FILES:
        parts.append(f"And {counted(len(files) - MOST_FILES, 'more part')}.")
    return "\n\n".join([*parts, _seen(exported)])


def _size(held: Any) -> str:
    return readable.size(held) if isinstance(held, (int, float)) else "-"


def _seen(exported: Exported) -> str:
    progress, identity = exported.progress, exported.state.get("identity")
    rows = identity.get("samples") if isinstance(identity, Mapping) else None
    held = f" The data gave {counted(rows, 'row')} for training." if isinstance(rows, int) else ""
    ranks = exported.state.get("world_size")
    where = f" on {counted(ranks, 'rank')}" if isinstance(ranks, int) else ""
    # Rows are samples unless they are packed, and what counts as tokens may be images.
    named = {"samples": "row", **({"tokens": "token"} if facts.counts_tokens(exported) else {})}
    seen = [counted(progress[key], noun) for key, noun in named.items() if progress.get(key)]
    steps = counted(int(progress.get("step") or 0), "step")
    counts = f" over {' and '.join(seen)}" if seen else ""
    return f"The run made {steps}{counts} in {readable.duration(float(progress.get('seconds') or 0))}{where}.{held}"


def _recipe(exported: Exported) -> str:
    text = yaml.safe_dump(facts.settings(exported.recipe), sort_keys=False, allow_unicode=True)
    return (
        "What decided the training, without settings of the machine; folders are cut to their last part.\n\n"
        f"{_fenced(text.rstrip(), 'yaml')}"
    )


def _results(exported: Exported) -> str:
    step, numbers, loss = facts.results(exported)
    parts = []
    if numbers:
        rows = [(plain(name), readable.number(value)) for name, value in numbers.items()]
        parts += [f"Measured by the run's own evaluations at step {step:,}.", _table(("number", "value"), rows)]
    if loss is not None:
        parts.append(f"The last logged training loss up to step {exported.step:,} is {readable.loss(loss)}.")
    return "\n\n".join(parts) or "The run measured nothing up to this step."


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _fenced(text: str, language: str) -> str:
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _code(text: str) -> str:
    """Text for inline code."""
    return " ".join(text.split()).replace("`", "'")
