"""Names that Kubernetes accepts, made from a run's name.

Must not know what they name.
"""

from __future__ import annotations

import hashlib
import re

LONGEST = 40
"""A pod is called NAME-node-0-INDEX, and that must be a host name of at most 63 characters."""


def job_name(run: str, *, number: str) -> str:
    """A DNS label: `Llama_3.1-8B`, job 2, is `llama-3-1-8b-2`. A name that had to be cut ends in a hash of all of it:
    two long names stay apart."""
    label = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    label = label if label[:1].isalpha() else f"run-{label}".rstrip("-")
    room = LONGEST - len(number) - 1
    if len(label) > room:
        label = f"{label[: room - 7].rstrip('-')}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"
    return f"{label}-{number}"


def label_value(text: str) -> str:
    """Text as the value of a label."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("-_.")
