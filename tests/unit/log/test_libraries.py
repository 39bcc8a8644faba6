from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fullshard.log.console import Console
from fullshard.log.libraries import route


@contextmanager
def library_with_its_own_handler() -> Iterator[logging.Logger]:
    """A logger like that of Transformers: a handler of its own to stderr, and no propagation."""
    logger = logging.getLogger("some_library")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    logger.propagate = False
    yield logger
    assert handler in logger.handlers
    logger.removeHandler(handler)
    logger.propagate = True


def test_a_library_speaks_once_through_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    with library_with_its_own_handler() as library, route(Console(stream=out)):
        for _ in range(3):
            library.warning("expect %s differences", "numerical")
        library.info("chatter")
    assert out.getvalue() == "some_library: expect numerical differences\n"
    assert capsys.readouterr().err == ""


def test_afterwards_everything_is_as_before() -> None:
    with library_with_its_own_handler() as library:
        before, root, show = list(library.handlers), list(logging.root.handlers), warnings.showwarning
        with route(Console(stream=io.StringIO())):
            assert library.handlers != before
        assert library.handlers == before
        assert logging.root.handlers == root
        assert warnings.showwarning is show


def test_a_library_imported_later_is_taken_too(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    late = logging.getLogger("late_library")
    handler = logging.StreamHandler(sys.stderr)
    with route(Console(stream=out)) as libraries:
        late.addHandler(handler)
        late.propagate = False
        libraries.take()
        late.warning("here I am")
    late.removeHandler(handler)
    late.propagate = True
    assert out.getvalue() == "late_library: here I am\n"
    assert capsys.readouterr().err == ""


def test_transformers_own_handler_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging as theirs

    out = io.StringIO()
    logger = theirs.get_logger("transformers.some_model")
    root = logging.getLogger("transformers")
    before = list(root.handlers)
    root.handlers = [logging.StreamHandler(sys.stderr)]
    try:
        with route(Console(stream=out)):
            logger.warning_once("You are not running the flash-attention implementation.")
    finally:
        root.handlers = before
    assert out.getvalue() == "transformers: You are not running the flash-attention implementation.\n"
    assert capsys.readouterr().err == ""


def test_python_warnings_are_said_once_with_their_origin() -> None:
    out = io.StringIO()
    with route(Console(stream=out)), warnings.catch_warnings():
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn("Gradients will be None", UserWarning, stacklevel=1)
            warnings.warn_explicit("old", FutureWarning, "/x/site-packages/peft/tuners/lora.py", 3)
    assert out.getvalue() == "test_libraries: UserWarning: Gradients will be None\npeft: FutureWarning: old\n"


def test_our_own_warnings_are_warnings() -> None:
    out = io.StringIO()
    with route(Console(stream=out)):
        logging.getLogger("fullshard.data.loader").warning("slow")
    assert out.getvalue() == "warning: slow\n"


def test_chatter_reaches_log_txt_when_debugging(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(stream=out)
    console.open_log(tmp_path / "log.txt", debug=True)
    with library_with_its_own_handler() as library, route(console):
        library.setLevel(logging.DEBUG)
        library.debug("detail")
        library.setLevel(logging.NOTSET)
    console.close()
    assert out.getvalue() == ""
    assert "some_library: detail" in (tmp_path / "log.txt").read_text()


def test_a_broken_format_string_does_not_stop_a_run() -> None:
    out = io.StringIO()
    with library_with_its_own_handler() as library, route(Console(stream=out)):
        library.warning("%d items", "many")
    assert out.getvalue() == "some_library: %d items\n"
