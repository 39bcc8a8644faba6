"""Python code that loads an exported folder with the libraries that it was written for. Must not run it."""

from __future__ import annotations

import re
from pathlib import Path

_PROCESSORS = (
    ("processor_config.json", "processor = transformers.AutoProcessor.from_pretrained({0!r})"),
    ("preprocessor_config.json", "processor = transformers.AutoProcessor.from_pretrained({0!r})"),
    ("tokenizer_config.json", "tokenizer = transformers.AutoTokenizer.from_pretrained({0!r})"),
)
"""A file that an export may hold, and the line that loads what it describes; the first that is there counts."""
_SENTENCES = "modules.json"
"""A folder of sentence-transformers, whose one class loads the tokenizer too."""


def importing(line: str) -> str:
    """A line of Python with the imports that it needs; its result is called `model`, unless the line assigns names."""
    bare = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "''", line)
    assigned = set(re.findall(r"(?:^|;\s*)(\w+) = ", bare))
    # safetensors.torch of safetensors.torch.load_file(, transformers of transformers.AutoModel.from_pretrained(
    modules = dict.fromkeys(found.rstrip(".") for found in re.findall(r"(?<![\w.])((?:[a-z_]\w*\.)+)", bare))
    imports = [name for name in modules if name.partition(".")[0] not in assigned]
    named = line if assigned else f"model = {line}"
    return f"import {', '.join(imports)}; {named}" if imports else named


def load_code(line: str, folder: Path, *, place: str) -> str:
    """The lines that load what `folder` holds: its model by `line`, and the tokenizer or processor beside it."""
    beside = next((text.format(place) for name, text in _PROCESSORS if (folder / name).is_file()), None)
    lines = [re.sub(r"^import [^;]*; ", "", importing(line))]
    lines += [beside] if beside and not (folder / _SENTENCES).is_file() else []
    return re.sub(r"; (?=[a-z]\w*(?: = |\.\w+\())", "\n", importing("; ".join(lines)))
