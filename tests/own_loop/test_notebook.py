"""In a real Jupyter kernel: the example notebook, one bar that moves, Ctrl-C, and several runs in one kernel."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from jupyter_client.manager import KernelManager

from tests.small import model_folder, recipe, token_file

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")  # of Jupyter's own libraries


def environment() -> dict[str, str]:
    """Of a kernel. Within pytest, a kernel does not show what processes print."""
    ours = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    return {name: value for name, value in (os.environ | ours).items() if name != "PYTEST_CURRENT_TEST"}


def seen(text: str) -> list[str]:
    """The lines that a notebook shows: a carriage return goes back to the start of the line."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


class Kernel:
    """A kernel; its cells run one after the other."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager()
        self.manager.start_kernel(cwd=str(folder), env=environment())
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=180)

    def run(self, code: str, *, interrupt_at: str | None = None) -> tuple[str, str]:
        """What a cell prints, and the error that ends it; interrupts it when a text appears."""
        ours, said, error = self.client.execute(code), "", ""
        end = time.monotonic() + 600
        while time.monotonic() < end:
            message = self.client.get_iopub_msg(timeout=600)
            content = message["content"]
            if message["parent_header"].get("msg_id") != ours:
                continue
            if message["msg_type"] == "stream":
                said += content["text"]
            elif message["msg_type"] == "error":
                error = f"{content['ename']}: {content['evalue']}"
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return said, error
            if interrupt_at and re.search(interrupt_at, said):
                self.manager.interrupt_kernel()
                interrupt_at = None
        raise AssertionError(f"no end of {code!r} after: {said}")

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    model_folder(tmp_path / "model")
    token_file(tmp_path / "train.jsonl", records=40)
    opened = Kernel(tmp_path)
    yield opened
    opened.close()


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Steps that last long enough to be interrupted."""
    base = recipe(folder, duration={"steps": 4000}, checkpoint={"at_end": True}, **changes)
    return base | {"batch": {"per_device": 2, "global": 8}}


def test_the_example_notebook(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", 4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment())
    said = [text_of(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "Setup is CORRECT" in said[1]
    assert "\x1b" not in said[1]
    assert said[2].count("\r") > 3  # the bar moved
    lines = [line for line in seen(said[2]) if not line.startswith("warning:")]  # a busy machine is slow
    assert len([line for line in lines if line.startswith("Training:")]) == 1
    assert not [line for line in lines if line.startswith("step ")]
    assert len(lines) < 78, "the header, a bar, the end: no line for each step"
    assert "BestCheckpoint(path=" in said[3]
    assert re.search(r"^40 +\d", said[4], flags=re.MULTILINE)
    assert said[5].rstrip().splitlines()[-1].startswith("The for statement")


def text_of(cell: Any) -> str:
    return "".join(
        output["text"] if output.output_type == "stream" else output["data"].get("text/plain", "")
        for output in cell.outputs
        if output.get("name") != "stderr"
    )


def test_interrupted_and_continued(kernel: Kernel, tmp_path: Path) -> None:
    """Runs in one kernel: on two ranks and stopped by the user; the line that it prints continues it, here on one; that
    is stopped as well, and finished."""
    kernel.run(f"import fullshard\nrecipe = {settings(tmp_path)!r}\ndone = 0")
    for devices in (2, 1):
        kernel.run(f"recipe['topology']['devices'] = {devices}")
        said, error = kernel.run("result = fullshard.train(recipe)", interrupt_at=r"Training: +\d+%.*[3-9]/4000")
        assert not error, said
        assert re.findall(r"Stopped by a signal at step \d+, and saved.*\n +(.*)\n", said) == [
            "fullshard.train(recipe)"
        ]
        said, _ = kernel.run(
            "print(result.stopped, result.step > done, result.last_checkpoint.name)\ndone = result.step"
        )
        assert said.startswith("signal True checkpoint-")
    said, error = kernel.run("result = fullshard.train(recipe, f'duration={{steps: {done + 2}}}')")
    assert not error, said
    assert "Resuming from" in said
    assert kernel.run("print(result.stopped, result.step - done)")[0] == "done 2\n"
    assert kernel.run("print(type(result.model).__name__)")[0] == "FSDPQwen3ForCausalLM\n"

    own = "class Flat(fullshard.Schedule):\n    def after_warmup(self, step, total):\n        return 1.0\n"
    own += "recipe |= {'name': 'own', 'schedule': {'kind': '__main__.Flat'}}"
    kernel.run(own)
    _, error = kernel.run("fullshard.train(recipe, 'topology.devices=2')")
    assert "this class exists in this session only, and other ranks cannot import it" in error
    twice = "import os, signal\nfrom fullshard import loop\nstep = loop._step\n"
    twice += "def interrupted(*given):\n    step(*given)\n"
    twice += "    for _ in range(2):\n        os.kill(os.getpid(), signal.SIGINT)\n"
    kernel.run(f"{twice}loop._step = interrupted")
    _, error = kernel.run("fullshard.train(recipe)")
    assert error.startswith("KeyboardInterrupt: Stopped at once by a second signal")
    assert kernel.run("print(1 + 1)")[0] == "2\n"  # the kernel is alive
