"""`fullshard report` and `train --on-finish report` as commands: files, exit codes, messages, the server's manners."""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.report import on_finish
from fullshard.report.folders import Run
from fullshard.report.on_finish import at_the_end
from fullshard.report.verdict import judge
from tests import small
from tests.report.run_folders import finished, train_record, write_run


def fullshard(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_the_page_is_written_beside_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "runs" / "one", records=[train_record(1), finished(1)])
    write_run(tmp_path / "runs" / "two", records=[train_record(1)])
    done = fullshard("report", "one")
    assert (done.exit_code, "Wrote runs/one/report.html" in done.output) == (0, True)
    assert "<title>one" in (run / "report.html").read_text()
    assert fullshard("report", "one", "two").exit_code == 0
    assert "<title>one · two" in (tmp_path / "report.html").read_text()
    assert fullshard("report", "one", "--output", "mine.html").exit_code == 0
    assert (tmp_path / "mine.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "there is no such run folder"),
        (["one", "--output", "no/such/folder/page.html"], "cannot be written"),
        (["one", "--serve", "--output", "page.html"], "--serve writes no file"),
    ],
)
def test_mistakes_are_messages(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "one", records=[])
    done = fullshard("report", *words)
    assert (done.exit_code, said in done.output, "Traceback" in done.output) == (2, True, False)


def test_the_server_listens_here_only_and_ends_by_ctrl_c(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", records=[train_record(1)])
    command = [sys.executable, "-m", "fullshard", "report", str(run), "--serve"]
    # A shell's background job ignores Ctrl-C, and its children inherit that.
    heard: Any = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes, **heard) as started, contextlib.ExitStack() as ending:
        ending.callback(lambda: started.poll() is None and started.kill())
        assert started.stdout
        first = started.stdout.readline()
        [port] = re.findall(r"http://127\.0\.0\.1:(\d+)/ on this machine only", first)

        def ask(path: str, host: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=180)
            connection.request("GET", path, headers={"Host": host})
            status = connection.getresponse().status
            connection.close()
            return status

        here = f"127.0.0.1:{port}"
        assert [ask("/", here), ask("/state", here), ask("/log.txt", here)] == [200, 200, 404]
        assert ask("/../run/log.txt", here) == 404
        assert ask("/", "a-web-site.example") == 421, "a name that was made to point here"
        taken = subprocess.run([*command, "--port", port], capture_output=True, text=True, check=False)
        assert (taken.returncode, f"--port {port} cannot be used" in taken.stderr) == (2, True)
        started.send_signal(signal.SIGINT)
        rest = started.communicate(timeout=180)[0]
    assert (started.returncode, "Ended." in rest, "Traceback" in rest) == (0, True, False)


def recipe(folder: Path, **sections: Any) -> Path:
    small.model_folder(folder / "model", num_hidden_layers=1)
    small.token_file(folder / "train.jsonl", records=16)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(small.recipe(folder, name="run", duration={"steps": 2}, **sections)))
    return path


def test_train_writes_the_page_of_a_run_that_ends_and_of_one_that_fails(tmp_path: Path) -> None:
    """In one process, as under a launcher: rank 0 of 1."""
    path = recipe(tmp_path, topology={"device": "cpu", "devices": 1})
    done = fullshard("train", str(path), "--on-finish", "report")
    run = tmp_path / "runs" / "run"
    assert (done.exit_code, f"Report: {run / 'report.html'}" in done.output) == (0, True)
    assert "It finished 2 steps" in (run / "report.html").read_text()
    assert judge(Run(run, "run")).state == "finished"
    # A learning rate that makes the second step NaN: the guard stops the run.
    failed = fullshard("train", str(path), "--on-finish", "report", "--resume", "never", "optimizer.lr=1e30")
    assert failed.exit_code == 3
    assert "Stopped by the guard" in (run / "report.html").read_text()
    wrong = fullshard("train", str(path), "--on-finish", "dance")
    assert (wrong.exit_code, "--on-finish" in wrong.output) == (2, True)


def test_a_page_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(folder: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(on_finish, "_write", fails)
    with pytest.raises(KeyError, match="the run's own error"), at_the_end("report", tmp_path, writes=True):
        raise KeyError("the run's own error")
    assert "warning: --on-finish report: no page was written (OSError: no space left" in capsys.readouterr().err


def test_only_one_process_writes(tmp_path: Path) -> None:
    write_run(tmp_path / "run", records=[])
    with at_the_end("report", tmp_path / "run", writes=False):
        pass
    with at_the_end(None, tmp_path / "run", writes=True):
        pass
    assert not (tmp_path / "run" / "report.html").exists()
    with at_the_end("report", tmp_path / "run", writes=True):
        pass
    assert (tmp_path / "run" / "report.html").exists()


def test_the_library_is_whole_and_has_its_licence() -> None:
    """They lie inside the package folder, all of which hatchling puts into a wheel."""
    assets = Path(on_finish.__file__).parent / "assets"
    held = {path.name for path in assets.iterdir()}
    assert {"uPlot-1.6.32.min.js", "uPlot-1.6.32.min.css", "uPlot-1.6.32.LICENSE.txt"} <= held
    assert "(v1.6.32)" in (assets / "uPlot-1.6.32.min.js").read_text()[:100]
    assert "MIT" in (assets / "uPlot-1.6.32.LICENSE.txt").read_text()
