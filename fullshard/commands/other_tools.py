"""Commands that other tools have, and what does the same here. Must not know how anything is done."""

from __future__ import annotations

from collections.abc import Container, Sequence

from fullshard.errors import SetupError

_TRAIN, _GENERATE = "fullshard train RECIPE", "fullshard generate RUN --prompt TEXT"
ELSEWHERE = {
    "merge": "fullshard export RUN OUT --as merged",
    "convert": "fullshard export RUN OUT",
    "save": "fullshard export RUN OUT",
    **dict.fromkeys(("eval", "test", "validate", "benchmark"), "fullshard evaluate RUN"),
    **dict.fromkeys(("finetune", "fine-tune", "sft", "fit", "run", "pretrain", "launch"), _TRAIN),
    "resume": f"{_TRAIN}, which continues from the last checkpoint",
    **dict.fromkeys(("infer", "inference", "chat", "predict", "complete"), _GENERATE),
    **dict.fromkeys(("doctor", "preflight", "env"), "fullshard check RECIPE"),
}
"""By the name of the command elsewhere."""


def refuse_foreign(words: Sequence[str], known: Container[str]) -> None:
    """An error for a command of another tool, with the one that is meant."""
    if words and words[0] not in known and (meant := ELSEWHERE.get(words[0].lower())):
        raise SetupError(f"there is no command {words[0]!r}. Use: {meant}")
