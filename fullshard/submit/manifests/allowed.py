"""What Kubernetes accepts as a value: quantities, names, labels, images and paths. A cluster would refuse anything else
after the job is written, and often without a word in a pod that never starts.

Must not know which object a value goes into.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from fullshard.errors import SetupError
from fullshard.submit.manifests.pods import RECIPE_FOLDER, SHARED_MEMORY, Mount

_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_VALUE = r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?"
_HOST = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_PART = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"


@dataclass(frozen=True)
class Kind:
    """A kind of value: its form, and that in words."""

    pattern: str
    words: str
    longest: int = 253

    def check(self, option: str, values: Iterable[str | None]) -> None:
        for value in values:
            if value is None:
                continue
            if not re.fullmatch(self.pattern, value, flags=re.ASCII) or len(value) > self.longest:
                raise SetupError(f"{option} {value!r} is not {self.words}.")


MEMORY = Kind(
    r"(?=.*[1-9])(\d+\.?\d*|\.\d+)([KMGTPE]i|[kMGTPE]|[eE]\d+)?",
    "an amount of memory that Kubernetes knows. Write 512Gi or 512Mi (1024s), 64G or 64M (1000s), or bytes",
)
CPUS = Kind(r"(?=.*[1-9])(\d+\.?\d*|\.\d+|\d+m)", "a number of CPUs that Kubernetes knows. Write 32, 1.5 or 500m")
NAMESPACE = Kind(
    _LABEL,
    "a name that Kubernetes accepts. Write lower-case letters, digits and hyphens, at most 63; no hyphen at the ends",
    63,
)
NAME = Kind(
    _SUBDOMAIN,
    "a name that Kubernetes accepts. Write lower-case letters, digits, hyphens and dots; no hyphen or dot at the ends",
)
VARIABLE = Kind(r"[A-Za-z_.-][\w.-]*", "a name of a variable. Write letters, digits and _, with no digit first")
KEY = Kind(
    rf"({_SUBDOMAIN}/)?{_VALUE}",
    "a key that Kubernetes accepts. Write letters, digits, -, _ and ., after a domain if it has one: nvidia.com/gpu",
    317,
)
LABEL_VALUE = Kind(rf"({_VALUE})?", "a value of a label. Write letters, digits, -, _ and ., at most 63", 63)
IMAGE = Kind(
    rf"({_HOST}(\.{_HOST})*(:\d+)?/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@[A-Za-z][\w.+-]*:[0-9a-fA-F]{{32,}})?",
    "the name of an image. Write NAME:TAG, in lower case and without spaces: registry.example/train:1",
    512,
)


_OURS = {SHARED_MEMORY: "the shared memory", RECIPE_FOLDER: "the recipe"}
"""What every pod has, by its path."""


def mounts(texts: Sequence[str]) -> tuple[Mount, ...]:
    """Volumes given as CLAIM:PATH. No path may be there twice, or overlap with what every pod has."""
    found: dict[str, Mount] = {}
    for text in texts:
        claim, _, path = text.partition(":")
        if not claim or not path.startswith("/") or ":" in path:
            raise SetupError(
                f"--volume {text} is not CLAIM:PATH. Write a claim and an absolute path: my-claim:/workspace."
            )
        NAME.check(f"--volume {text}: the claim", [claim])
        mount = Mount(claim, str(PurePosixPath(path)))
        taken = next((ours for ours in _OURS if _overlap(mount.path, ours)), mount.path)
        if taken in _OURS or taken in found:
            by = _OURS[taken] if taken in _OURS else f"volume {found[taken].claim}"
            raise SetupError(f"--volume {text}: {by} is mounted at {taken}. Choose another path.")
        found[mount.path] = mount
    return tuple(found.values())


def _overlap(one: str, other: str) -> bool:
    return PurePosixPath(one).is_relative_to(other) or PurePosixPath(other).is_relative_to(one)
