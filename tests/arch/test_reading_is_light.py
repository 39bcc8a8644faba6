"""Help, the schema and reading a recipe import neither torch nor the libraries that models and data need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.config.families import recipes

HEAVY = ("torch", "transformers", "datasets", "diffusers", "peft", "pyarrow", "pandas", "scipy", "PIL", "tokenizers")
_REPORT = f"print('imported:', *[name for name in {HEAVY!r} if name in sys.modules])"

OWN_PART = """
from fullshard import Schedule

class Flat(Schedule):
    def after_warmup(self, step, total):
        return 1.0
"""


def imported(code: str, *, folder: Path) -> str:
    """What of HEAVY a fresh interpreter has imported after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{_REPORT}"],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].removeprefix("imported:").strip()


@pytest.mark.parametrize("command", ["--help", "train --help", "check --help", "recipes", "presets", "recipes schema"])
def test_help_and_schema_import_nothing_heavy(command: str, tmp_path: Path) -> None:
    code = f"""
sys.argv = ['fullshard', *{command.split()!r}]
from fullshard.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert imported(code, folder=tmp_path) == ""


def test_reading_any_built_in_recipe_imports_nothing_heavy(tmp_path: Path) -> None:
    read = f"from fullshard.recipes.read import read_recipe\nfor name in {[*recipes()]!r}:\n    read_recipe(name)"
    assert imported(read, folder=tmp_path) == ""


def test_reading_a_recipe_with_a_users_own_part_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_PART)
    read = (
        "from fullshard import read\nassert read('quickstart', 'schedule={kind: mine.Flat}').schedule.factor(0, 1) == 1"
    )
    assert imported(read, folder=tmp_path) == ""


def test_training_says_something_before_torch_is_imported(tmp_path: Path) -> None:
    code = """
import os

class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print("torch is imported now", flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
sys.argv = ["fullshard", "train", "quickstart"]
from fullshard.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    first, last = done.stdout.splitlines()
    assert first == f"Starting quickstart; its run folder is {Path('runs') / 'quickstart'}."
    assert last == "torch is imported now"
