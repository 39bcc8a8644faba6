"""Families are found by folder and by entry point: their kinds, recipes and commands, and errors for broken ones."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.commands.recipes import sentence
from fullshard.config import families, part
from fullshard.config.part import decode, kinds, part_class
from fullshard.contracts.objective import Objective
from fullshard.contracts.schedule import Schedule
from fullshard.errors import RecipeError, SetupError
from fullshard.recipes.read import read_recipe

STAIRS = '''
from fullshard.contracts.schedule import Schedule

class Stairs(Schedule):
    """A schedule of another package."""

    height: float = 0.5

    def after_warmup(self, step, total):
        return self.height

__all__ = ["Stairs"]
'''
HELLO = '''
import typer

def hello() -> None:
    """Say hello."""
    typer.echo("hello from a family")
'''
Install = Callable[..., Path]


def _forget() -> None:
    for cached in (families.families, families.folders, part._modules):
        cached.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package with files on the path, and a distribution that names it as a family."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    packages: list[str] = []

    def put(package: str, files: dict[str, str] | None = None, *, name: str | None = None, there: bool = True) -> Path:
        packages.append(package)
        facts = site / f"{package}-1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text(f"[{families.GROUP}]\n{name or package} = {package}\n")
        for path, text in {"__init__.py": "", **(files or {})}.items() if there else ():
            file = site / package / path
            file.parent.mkdir(parents=True, exist_ok=True)
            (file.parent / "__init__.py").touch()
            file.write_text(text)
        importlib.invalidate_caches()
        _forget()
        return site

    yield put
    for module in [module for module in sys.modules if module.partition(".")[0] in packages]:
        del sys.modules[module]
    _forget()


def test_kinds_come_from_the_engine_and_from_families() -> None:
    assert {"cosine", "linear"} <= set(kinds(Schedule)), "the engine's"
    assert {"causal_lm", "contrastive", "flow_matching"} <= set(kinds(Objective)), "of three families"
    for name in families.families():
        assert families.families()[name] == f"fullshard.families.{name}"
    # A helper that exports a class of torch's is not a part.
    from fullshard.contracts.optimizer import Optimizer

    assert "muon" in kinds(Optimizer)
    assert "muon_update" not in kinds(Optimizer)
    for contract in (Schedule, Objective, Optimizer):
        for kind in kinds(contract):
            assert part_class(contract, kind, where="").kind() == kind


def test_an_installed_package_adds_a_family(install: Install) -> None:
    files = {"schedules/stairs.py": STAIRS, "schedules/steps_of_stairs.py": "HEIGHT = 1\n"}
    recipe = "# A recipe of another package.\nmodel: some/model\ndata: {train: a.jsonl}\nschedule: stairs\n"
    install("lab_family", {**files, "recipes/lab.yaml": recipe, "commands/hello.py": HELLO})
    assert "stairs" in kinds(Schedule)
    assert "steps_of_stairs" not in kinds(Schedule)
    found = decode(Schedule, {"kind": "stairs", "height": 0.25}, where="schedule")
    assert (found.kind(), type(found).__module__) == ("stairs", "lab_family.schedules.stairs")
    assert sentence(families.recipes()["lab"]) == "A recipe of another package."
    assert read_recipe("lab").schedule.kind() == "stairs"
    assert "hello" in families.commands()


def test_a_command_of_a_family_is_in_the_help_and_runs(install: Install) -> None:
    install("lab_family", {"commands/hello.py": HELLO})
    help_text = CliRunner().invoke(app, ["--help"]).output
    assert "hello     Say hello." in help_text
    assert CliRunner().invoke(app, ["hello"]).output == "hello from a family\n"
    assert "Did you mean 'hello'?" in CliRunner().invoke(app, ["helo"]).output


def test_two_packages_with_the_same_family_name_are_an_error(install: Install) -> None:
    install("lab_one", name="lab")
    install("lab_two", name="lab")
    with pytest.raises(
        SetupError, match=r"Two packages provide a family called 'lab': lab_\w+ and (lab_\w+). Uninstall"
    ):
        families.families()


def test_two_packages_with_the_same_kind_are_an_error(install: Install) -> None:
    install("lab_one", {"schedules/cosine.py": STAIRS})
    with pytest.raises(SetupError) as caught:
        kinds(Schedule)
    assert "kind: cosine is ambiguous" in str(caught.value)
    assert "fullshard.schedules.cosine and lab_one.schedules.cosine" in str(caught.value)


@pytest.mark.parametrize(
    ("package", "broken", "there", "reason"),
    [
        ("lab_gone", "", False, "ModuleNotFoundError: No module named 'lab_gone'"),
        ("lab_needs", "import no_such_package", True, "ModuleNotFoundError: No module named 'no_such_package'"),
        ("lab_broken", "raise RuntimeError('built for another version')", True, "RuntimeError: built for another"),
    ],
)
def test_a_broken_family_is_named_with_its_distribution(
    install: Install, package: str, broken: str, there: bool, reason: str
) -> None:
    site = install(package, there=there)
    if there:
        (site / package / "__init__.py").write_text(broken)
    with pytest.raises(SetupError) as caught:
        kinds(Schedule)
    assert f"The family {package!r} of the installed package {package} cannot be used" in str(caught.value)
    assert reason in str(caught.value)
    assert f"uninstall {package}." in str(caught.value)
    for words in (["--help"], ["train", "quickstart", "--dry-run"], ["no-such-command"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert f"Error: The family {package!r}" in result.output, "and no traceback"


def test_a_file_that_exports_another_part_is_an_error(install: Install) -> None:
    install("lab_family", {"objectives/stairs.py": STAIRS})
    with pytest.raises(SetupError, match=r"lab_family.objectives.stairs.__all__ names no Objective"):
        part_class(Objective, "stairs", where="objective")


def test_without_a_family_its_default_kind_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {name: module for name, module in part._modules(Objective.folder).items() if name != "causal_lm"}
    monkeypatch.setattr(part, "_modules", lambda folder: engine)
    with pytest.raises(RecipeError, match=r"objective.kind is missing. Known: \w+, "):
        decode(Objective, {}, where="objective")


def test_help_and_finding_kinds_and_recipes_need_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom fullshard.cli import app\n"
        "run = lambda *words: CliRunner().invoke(app, words).exit_code\n"
        "assert run('train', '--help') == 0\n"
        "assert not [m for m in sys.modules if m.startswith('fullshard.families.')], 'only where one is asked for'\n"
        "assert run('--help') == run('sample', '--help') == run('recipes') == run('recipes', 'show', 'llm') == 0\n"
        "import fullshard.commands.schema, fullshard.recipes.read\n"
        "from fullshard import Encoder, Evaluation, Family, Launcher, Objective, Optimizer, Schedule, Sink, Source\n"
        "from fullshard.config.part import kinds\n"
        "contracts = Encoder, Evaluation, Family, Launcher, Objective, Optimizer, Schedule, Sink, Source\n"
        "assert all(kinds(contract) for contract in contracts)\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_two_families_with_the_same_command_are_an_error(install: Install) -> None:
    install("lab_family", {"commands/sample.py": HELLO.replace("hello", "sample")})
    with pytest.raises(SetupError, match="fullshard sample is ambiguous"):
        families.commands()


def test_a_family_does_not_replace_a_command_of_the_engine(install: Install) -> None:
    install("lab_family", {"commands/train.py": HELLO.replace("hello", "train")})
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 2
    assert "Error: lab_family.commands.train defines the command train, which fullshard already has." in result.output
