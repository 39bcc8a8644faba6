"""`fullshard explain`: what it takes, what it prints, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fullshard.commands.explain import explain
from fullshard.errors import SetupError
from fullshard.explain import crash
from fullshard.explain.record import FOLDER, entries
from fullshard.explain.render import page

ROOT = Path(__file__).parents[3]


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command("explain", context_settings={"ignore_unknown_options": True})(explain)
    return made


def call(app: typer.Typer, *words: str, code: int = 0, given: str | None = None) -> str:
    result = CliRunner().invoke(app, words, input=given, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_a_message_is_explained(app: typer.Typer) -> None:
    text = call(app, "ValueError: Attempting to unscale FP16 gradients.")
    assert text.startswith("The gradient scaler got fp16 gradients (unscale-fp16)")
    assert "found  Attempting to unscale FP16 gradients" in text
    assert "1. Store what is trained in float32" in text
    assert "avoid  - Adding --fp16" in text
    assert "keys   precision, optimizer.clip" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "\x1b" not in text


def test_several_words_are_one_text(app: typer.Typer) -> None:
    assert "(unscale-fp16)" in call(app, "Attempting", "to", "unscale", "FP16", "gradients.")


def test_standard_input_and_files(app: typer.Typer, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("x\n" * 4_000_000 + "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB\n")
    assert "(cuda-out-of-memory)" in call(app, str(log))
    assert "(cuda-out-of-memory)" in call(app, "-", given="RuntimeError: CUDA out of memory.")


def test_nothing_known_ends_with_1(app: typer.Typer) -> None:
    assert "No known error in this text" in call(app, "all is well", code=1)
    assert json.loads(call(app, "all is well", "--json", code=1)) == {"matches": []}


def test_a_missing_file_is_a_mistake(app: typer.Typer, tmp_path: Path) -> None:
    for name in ("run/log.txt", "train.log"):
        with pytest.raises(SetupError, match="does not exist"):
            call(app, str(tmp_path / name) if "/" in name else name)
    with pytest.raises(SetupError, match="holds neither a crash folder nor a log"):
        call(app, str(tmp_path))


@pytest.mark.parametrize("text", [f"/data/{'x' * 300}: CUDA out of memory", "~~~~^^^ CUDA out of memory", "a\0b"])
def test_a_text_that_cannot_be_a_path_is_a_text(app: typer.Typer, text: str) -> None:
    call(app, text, code=0 if "CUDA" in text else 1)


def test_several_matches_are_named(app: typer.Typer) -> None:
    text = call(app, "None of the inputs have requires_grad=True ... CUDA out of memory")
    assert text.startswith("The GPU ran out of memory")
    assert "Also in this text" in text
    assert "nothing-requires-grad" in text


def test_json(app: typer.Typer) -> None:
    [match] = json.loads(call(app, "--json", "optimizer got an empty parameter list"))["matches"]
    assert (match["name"], match["found"]) == ("empty-parameter-list", "optimizer got an empty parameter list")
    assert match["remedy"][0].startswith("Check")
    assert len(json.loads(call(app, "--json"))) == len(entries())


def test_no_argument_lists_the_entries_and_a_name_shows_one(app: typer.Typer) -> None:
    text = call(app)
    for entry in entries():
        assert entry.name in text
    assert call(app, "disk-full").startswith("The disk is full (disk-full)")
    assert json.loads(call(app, "disk-full", "--json"))["name"] == "disk-full"


def test_a_run_folder_explains_its_newest_crash(app: typer.Typer, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    crash.write(RuntimeError("CUDA out of memory"), folder=tmp_path, rank=0, world=2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    crash.write(RuntimeError("Connection closed by peer"), folder=tmp_path, rank=0, world=2)
    crash.write(OSError(28, "No space left on device"), folder=tmp_path, rank=1, world=2)
    assert "(disk-full)" in call(app, str(tmp_path))
    assert "(cuda-out-of-memory)" in call(app, str(tmp_path / "crash-1"))


def test_the_page_is_what_the_entries_say() -> None:
    """Write it anew with: python -m fullshard.explain"""
    assert (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8") == page()


def test_the_page_has_every_entry_and_no_broken_link() -> None:
    text = page()
    for entry in entries():
        assert f"(#{entry.name})" in text
        assert f'<a id="{entry.name}"></a>\n\n### {entry.title}\n' in text
        for step in entry.remedy:
            assert " ".join(step.split()) in " ".join(text.split())


def test_entries_travel_with_the_package() -> None:
    """They lie inside the package folder, all of which hatchling puts into a wheel."""
    import fullshard

    assert FOLDER.parent.parent == Path(fullshard.__file__).parent
    assert 'packages = ["fullshard"]' in (ROOT / "pyproject.toml").read_text()


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, fullshard.commands.explain as command; command.explain(['CUDA out of memory']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
