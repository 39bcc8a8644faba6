"""The standard library's docstrings as pairs: what is in them, what is not, and a split by packages."""

from __future__ import annotations

import inspect
import json
import sys
import sysconfig
import textwrap
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.part import decode
from fullshard.contracts.data import Record, Source
from fullshard.data.prepare import choose_encoder
from fullshard.errors import DataError, RecipeError
from fullshard.families.embedding.encoders.pairs import Pairs
from fullshard.families.embedding.sources.docstrings import Docstrings


def rows(**settings: Any) -> list[Record]:
    records = Docstrings(**settings).open()
    return [records[index] for index in range(len(records))]


def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> Path:
    """A standard library of a few files."""
    folder = tmp_path / "stdlib"
    for name, code in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    return folder


def test_thousands_of_pairs_that_the_library_itself_confirms() -> None:
    found = rows()
    assert len(found) > 3000
    assert isinstance(choose_encoder(found[0]), Pairs)
    assert all(set(row) == {"query", "positive", "module"} for row in found)
    assert all(20 <= len(row["query"]) <= 400 and "\n" not in row["query"] for row in found)
    assert all(row["positive"].startswith(f"{row['module']}.") for row in found)
    assert len({row["query"] for row in found}) == len({row["positive"] for row in found}) == len(found)
    by_name = {row["positive"].partition("(")[0]: row for row in found}
    document = inspect.getdoc(json.dumps)
    assert document is not None
    assert by_name["json.dumps"]["query"] == " ".join(document.split("\n\n")[0].split())
    first, *others, last = inspect.signature(json.dumps).parameters
    assert by_name["json.dumps"]["positive"] == f"json.dumps({first}, *, {', '.join(others)}, **{last})"


def test_training_and_held_out_share_no_module_and_are_all() -> None:
    everything, train, held = rows(), rows(part="train"), rows(part="held_out")
    packages = [{row["module"].partition(".")[0] for row in part} for part in (train, held)]
    assert not packages[0] & packages[1]
    assert not {row["module"] for row in train} & {row["module"] for row in held}
    assert sorted(row["positive"] for row in (*train, *held)) == sorted(row["positive"] for row in everything)
    assert 0.08 < len(held) / len(everything) < 0.3
    assert not {row["query"] for row in train} & {row["query"] for row in held}


def test_private_names_other_packages_and_jokes_are_left_out() -> None:
    modules = {row["module"] for row in rows()}
    parts = {part for module in modules for part in module.split(".")}
    assert not parts & {"test", "tests", "idlelib", "turtledemo", "lib2to3", "pydoc_data", "ensurepip", "antigravity"}
    assert not [part for part in parts if part.startswith("_")]
    assert {module.partition(".")[0] for module in modules} <= sys.stdlib_module_names
    names = {name for row in rows() for name in row["positive"].partition("(")[0].split(".")}
    assert not [name for name in names if name.startswith("_")]


def test_places_and_fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Docstrings().open()
    path, line = records.where(0).rsplit(":", 1)
    name = records[0]["positive"].partition("(")[0].rpartition(".")[2]
    assert name in Path(path).read_text().splitlines()[int(line) - 1]
    assert records.fingerprint() == Docstrings().open().fingerprint()
    assert len({Docstrings(part=part).open().fingerprint() for part in ("train", "held_out", "all")}) == 3
    one = '"""No name here is documented, but one."""\ndef f(a):\n    """Do something useful with a."""\n'
    library(tmp_path / "a", monkeypatch, {"m.py": one})
    first = Docstrings().open().fingerprint()
    library(tmp_path / "b", monkeypatch, {"m.py": one.replace("useful", "else")})
    assert Docstrings().open().fingerprint() != first


def test_signatures_are_written_as_they_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = '''
        raise SystemExit("parsed, never run")

        def plain(a, b=1, *rest, c, d=2, **others):
            """First line of it,
               and the second.
            \x20
            Another paragraph."""
            def inner():
                """A function inside of a function."""

        async def ahead(a, /, b: int = 3, *, c) -> None:
            """Twenty characters at the very least."""

        if True:
            def guarded():
                """Defined under a condition."""
        else:
            try:
                pass
            except ImportError:
                def caught():
                    """Defined where an import failed."""

        class Thing:
            """What a thing is good for."""
            def __init__(self, size, *, colour="\\d"):
                """Documented, yet not public."""
            def act(self, when):
                """Lets the thing act at once."""
            @staticmethod
            def still(x):
                """Needs no thing to be called."""
            @functools.cached_property
            def weight(self):
                """How heavy the thing is, in grams."""
            @weight.setter
            def weight(self, value):
                """Lets the thing act at once."""
            class Inner:
                """A class inside of a class."""

        class _Hidden:
            def act(self):
                """Not to be seen by anyone."""

        def short():
            """Too short."""

        def long():
            """%s."""

        def undocumented(): ...

        def twice():
            """First line of it, and the second."""
    ''' % ("x" * 400)
    library(tmp_path, monkeypatch, {"pack/__init__.py": "", "pack/mod.py": code, "site-packages/x.py": code})
    assert {row["positive"]: row["query"] for row in rows()} == {
        "pack.mod.plain(a, b, *rest, c, d, **others)": "First line of it, and the second.",
        "pack.mod.ahead(a, /, b, *, c)": "Twenty characters at the very least.",
        "pack.mod.guarded()": "Defined under a condition.",
        "pack.mod.caught()": "Defined where an import failed.",
        "pack.mod.Thing(size, *, colour)": "What a thing is good for.",
        "pack.mod.Thing.act(when)": "Lets the thing act at once.",
        "pack.mod.Thing.still(x)": "Needs no thing to be called.",
        "pack.mod.Thing.weight": "How heavy the thing is, in grams.",
        "pack.mod.Thing.Inner": "A class inside of a class.",
    }


def test_a_python_without_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nowhere", "python.zip"):
        (tmp_path / "python.zip").write_bytes(b"")
        monkeypatch.setattr(sysconfig, "get_path", lambda _, name=name: str(tmp_path / name))
        with pytest.raises(DataError, match=r"no source files of Python's standard library are here"):
            Docstrings().open()
    folder = library(tmp_path, monkeypatch, {"m.py": "def ("})
    with pytest.raises(DataError, match=r"m\.py: this file of Python's standard library cannot be read: ") as caught:
        Docstrings().open()
    assert str(folder) in str(caught.value)


def test_recipes_name_it_in_every_form() -> None:
    assert decode(Source, {"kind": "docstrings", "part": "held_out"}, where="data.train") == Docstrings(part="held_out")
    with pytest.raises(RecipeError, match=r"data\.train\.part = 'heldout': it must be one of train, held_out, all"):
        decode(Source, {"kind": "docstrings", "part": "heldout"}, where="data.train")
