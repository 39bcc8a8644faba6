"""The command lines of the documents, and what makes them small enough for a CPU."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.rows.rows import ROOT
from tests.shrunk_recipes import shrunk

FOLDERS = {"S0": "diffusion", "S1": "embedding", "S2": "desktop", "S3": "audio", "S4": "staged"}
"""The folder of examples/ that has the scripts of a document."""


@dataclass(frozen=True)
class Line:
    """One command line."""

    document: str
    line: str
    recipe: str | None = None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)

    @property
    def script(self) -> str:
        """The script, or the module after -m."""
        words = self.words
        return words[words.index("-m") + 1] if "-m" in words else next(w for w in words if w.endswith(".py"))

    @property
    def after_the_script(self) -> list[str]:
        return self.words[self.words.index(self.script) + 1 :]

    @property
    def folder(self) -> Path:
        return ROOT / "examples" / FOLDERS[self.document]

    def ours(self) -> list[str]:
        """The same words after `fullshard train RECIPE`."""
        return [*([self.recipe] if self.recipe else []), *self.after_the_script]

    def smaller(self, local: Path, *, by_script: bool = False) -> list[str]:
        """What is appended: fewer ranks, fewer steps, a small model, small data. `local` has the inputs."""
        name = self.recipe or "embedding-8b"
        if name == "staged" and by_script:
            name = "llm"  # the recipe beside the script is one with stages
        settings = dict(setting.split("=", 1) for setting in [*shrunk(name, local), "duration.steps=2"])
        if "--dataset-path" in self.words:
            del settings["data.train.episodes"]
            settings["data.train"] = f"{local}/desktop.jsonl"
        if "--model-config" in self.words:
            settings["model.size"] = "tiny"
        if self.document == "S1":
            settings["data.encode"] = f"{{kind: pairs, image_root: {settings.pop('data.encode.image_root')}}}"
        small = [f"{key}={value}" for key, value in settings.items()]
        one_rank = ["topology.devices=1"] if "--gpus" in self.words else ["--devices", "1"]
        return [*one_rank, "--nodes", "1", *small]


LINES = [Line(**line) for line in yaml.safe_load((Path(__file__).parent / "command_lines.yaml").read_text())]
