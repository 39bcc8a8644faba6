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
from fullshard.log.libraries import route, write_nccl_log


@contextmanager
def library_with_its_own_handler() -> Iterator[logging.Logger]:
    """A logger like that of Transformers: its own handler to stderr, and no propagation."""
    logger = logging.getLogger("some_library")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    logger.propagate = False
    yield logger
    assert handler in logger.handlers
    logger.removeHandler(handler)
    logger.propagate = True


def warns(logger: logging.Logger, text: str, *arguments: object) -> None:
    """A warning from inside an installed package."""
    place = f"/x/site-packages/{logger.name}/file.py"
    logger.handle(logger.makeRecord(logger.name, logging.WARNING, place, 1, text, arguments, None))


@contextmanager
def routed(path: Path, out: io.StringIO) -> Iterator[None]:
    console = Console(stream=out)
    console.open_log(path / "log.txt")
    with route(console):
        yield
    console.close()


def written(path: Path) -> list[str]:
    """The lines of log.txt without time and rank."""
    return [line.partition("  ")[2] for line in (path / "log.txt").read_text().splitlines()]


def test_a_librarys_message_is_logged_once_in_log_txt_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = io.StringIO()
    with library_with_its_own_handler() as library, routed(tmp_path, out):
        for _ in range(3):
            warns(library, "expect %s differences", "numerical")
        library.info("chatter")
    assert written(tmp_path) == ["some_library: expect numerical differences"]
    assert (out.getvalue(), capsys.readouterr().err) == ("", "")


def test_an_error_of_a_library_is_shown(tmp_path: Path) -> None:
    out = io.StringIO()
    with library_with_its_own_handler() as library, routed(tmp_path, out):
        library.error("the disk is on fire")
    assert out.getvalue() == "some_library: the disk is on fire\n"
    assert written(tmp_path) == ["some_library: the disk is on fire"]


def test_handlers_are_restored_afterwards() -> None:
    with library_with_its_own_handler() as library:
        before, root, show = list(library.handlers), list(logging.root.handlers), warnings.showwarning
        with route(Console(stream=io.StringIO())):
            assert library.handlers != before
        assert library.handlers == before
        assert logging.root.handlers == root
        assert warnings.showwarning is show


def test_a_library_imported_later_is_routed_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = io.StringIO()
    late = logging.getLogger("late_library")
    handler = logging.StreamHandler(sys.stderr)
    with routed(tmp_path, out):
        late.addHandler(handler)  # as on import
        late.propagate = False
        warns(late, "here I am")
    assert late.handlers == [handler]
    late.removeHandler(handler)
    late.propagate = True
    assert written(tmp_path) == ["late_library: here I am"]
    assert (out.getvalue(), capsys.readouterr().err) == ("", "")


def test_the_handler_of_transformers_is_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers.utils import logging as theirs

    out = io.StringIO()
    logger = theirs.get_logger("transformers.some_model")
    root = logging.getLogger("transformers")
    before = list(root.handlers)
    root.handlers = [logging.StreamHandler(sys.stderr)]
    try:
        with routed(tmp_path, out):
            logger.warning_once("You are not running the flash-attention implementation.")
    finally:
        root.handlers = before
    assert written(tmp_path) == ["transformers: You are not running the flash-attention implementation."]
    assert (out.getvalue(), capsys.readouterr().err) == ("", "")


def test_warnings_of_packages_are_logged_and_those_of_the_users_code_are_shown(tmp_path: Path) -> None:
    out = io.StringIO()
    with routed(tmp_path, out), warnings.catch_warnings():
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn("Gradients will be None", UserWarning, stacklevel=1)
            warnings.warn_explicit("old", FutureWarning, "/x/site-packages/peft/tuners/lora.py", 3)
    assert out.getvalue() == "test_libraries: UserWarning: Gradients will be None\n"
    assert written(tmp_path) == ["test_libraries: UserWarning: Gradients will be None", "peft: FutureWarning: old"]


def test_our_own_warnings_are_shown() -> None:
    out = io.StringIO()
    with route(Console(stream=out)):
        logging.getLogger("fullshard.data.loader").warning("slow")
    assert out.getvalue() == "warning: slow\n"


def test_debug_messages_reach_log_txt_when_debugging(tmp_path: Path) -> None:
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


def test_a_broken_format_string_does_not_stop_a_run(tmp_path: Path) -> None:
    with library_with_its_own_handler() as library, routed(tmp_path, io.StringIO()):
        library.warning("%d items", "many")
    assert written(tmp_path) == ["some_library: %d items"]


def test_nccl_writes_into_the_run_folder_unless_its_own_variables_say_otherwise(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    write_nccl_log(tmp_path / "runs" / "one", 3, environ, trace=False)
    assert environ == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/runs/one/nccl-rank-3-%h-%p.txt"}
    assert (tmp_path / "runs" / "one").is_dir(), "NCCL makes no folder"
    traced: dict[str, str] = {}
    write_nccl_log(tmp_path, 0, traced, trace=True)
    assert traced == {"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl-rank-0-%h-%p.txt"}
    own = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "mine"}
    write_nccl_log(tmp_path, 0, own, trace=True)
    assert own == {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "mine"}
