"""What a run leaves when it crashes: a crash folder in the run folder, and last lines that say how it ended.

All ranks of one crash write into one folder, which each finds by itself: the newest one, if it was created by this
start of the run and this rank has not written there. Nothing here raises, and nothing hides the error itself.
Must not know recipes, models or data.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.errors import FullshardError, NumericalError
from fullshard.explain.error_file import REPORTED_BY_LAUNCHER, LastWords, hand_over
from fullshard.explain.match import Match, explain, explain_exception
from fullshard.explain.render import answer

_START = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""These identify one start of a run, and are equal on all its ranks."""
_ONE_CRASH_S = 3600.0
_METRICS_LINES, _LOG_LINES = 50, 200
_SHOWN = (
    *("CUDA_", "FULLSHARD_", "GLOO_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "PYTORCH_", "SLURM_", "TORCH_", "UCX_"),
    *("TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "HF_HOME", "HF_HUB_", "TOKENIZERS_"),
)
_SECRET = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|JWT|AUTH|CREDENTIAL|COOKIE)S?(?:_|$)")


def report(error: BaseException, *, folder: Path, rank: int, world: int, step: int | None = None) -> None:
    """Writes the crash folder of an error that ends the run, and hands its explanation to the launcher, or adds it to
    the end of the traceback. Does nothing for a mistake of the user."""
    with contextlib.suppress(Exception):
        lost = lost_a_rank(error)
        if not lost and not _is_crash(error):
            return
        crash = write(error, folder=folder, rank=rank, world=world, step=step)
        if REPORTED_BY_LAUNCHER in os.environ and (lost or not isinstance(error, FullshardError)):
            trace = "".join(traceback.format_exception(error))
            hand_over(f"{type(error).__name__}: {error}", traceback=trace, crash=str(crash) if crash else None)
        else:
            error.add_note(last_words(error, crash))


def _is_crash(error: BaseException) -> bool:
    if isinstance(error, FullshardError):
        return isinstance(error, NumericalError)
    # Not `Exception` alone: a failed DCP load or save is a BaseException.
    return not isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))


def write(error: BaseException, *, folder: Path, rank: int, world: int, step: int | None = None) -> Path | None:
    """The crash folder with what this rank knows; None if it cannot be written."""
    try:
        crash, made = _open(folder, rank)
        step = _last_step(folder) if step is None else step
        known = [
            ("time", time.strftime("%Y-%m-%d %H:%M:%S")),
            ("rank", f"{rank} of {world}"),
            ("host", f"{socket.gethostname()}, process {os.getpid()}"),
            ("step", f"{step} (the last logged)" if step is not None else "none logged"),
            ("command", " ".join(sys.argv)),
        ]
        lines = [f"{key:<8} {value}" for key, value in known]
        text = "\n".join([*lines, "", "".join(traceback.format_exception(error))])
        (crash / f"rank-{rank}.txt").write_text(text, encoding="utf-8", errors="replace")
    except Exception:
        return None
    if made:
        for add in (_add_recipe, _add_tails, _add_environment):
            with contextlib.suppress(Exception):
                add(folder, crash)
    return crash


def _open(folder: Path, rank: int) -> tuple[Path, bool]:
    """This crash's folder, and whether this rank made it."""
    folder.mkdir(parents=True, exist_ok=True)
    start = ", ".join(f"{name}={os.environ[name]}" for name in _START if name in os.environ) or f"pid={os.getpid()}"
    for _ in range(20):
        last = newest(folder)
        if last is not None and _is_this_crash(last, start, rank):
            return last, False
        number = int(last.name.removeprefix("crash-")) + 1 if last is not None else 1
        # Renamed when complete: the other ranks see no folder, or one that says which start it belongs to.
        new = Path(tempfile.mkdtemp(prefix=".crash-", dir=folder))
        new.chmod(0o755)
        try:
            (new / "start.txt").write_text(start + "\n", encoding="utf-8")
            os.rename(new, folder / f"crash-{number}")
            return folder / f"crash-{number}", True
        except OSError:
            if not (folder / f"crash-{number}").exists():
                raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
    raise FileExistsError(f"no crash folder could be made in {folder}")


def _is_this_crash(crash: Path, start: str, rank: int) -> bool:
    opened = crash / "start.txt"
    return (
        opened.exists()
        and opened.read_text(encoding="utf-8").strip() == start
        and time.time() - opened.stat().st_mtime < _ONE_CRASH_S
        and not (crash / f"rank-{rank}.txt").exists()
    )


def newest(folder: Path) -> Path | None:
    """The newest crash folder of a run."""
    found = [path for path in folder.glob("crash-*") if path.name.removeprefix("crash-").isdigit()]
    return max(found, key=lambda path: int(path.name.removeprefix("crash-")), default=None)


def _add_recipe(folder: Path, crash: Path) -> None:
    shutil.copyfile(folder / "recipe.resolved.yaml", crash / "recipe.resolved.yaml")


def _add_tails(folder: Path, crash: Path) -> None:
    for name, count in (("metrics.jsonl", _METRICS_LINES), ("log.txt", _LOG_LINES)):
        if lines := _tail(folder / name, count):
            (crash / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _add_environment(folder: Path, crash: Path) -> None:
    (crash / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n", encoding="utf-8")


def environment() -> dict[str, Any]:
    """The machine and the variables that matter to a run; nothing that could be a secret."""
    import psutil  # type: ignore[import-untyped]

    shown = {
        name: re.sub(r"://[^/@\s]*@", "://", value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_SHOWN) and not _SECRET.search(name)
    }
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "memory_free_gib": round(psutil.virtual_memory().available / 2**30, 1),
        "disk_free_gib": round(shutil.disk_usage(os.getcwd()).free / 2**30, 1),
        "variables": shown,
    }
    with contextlib.suppress(Exception):
        facts["packages"] = _versions()
    with contextlib.suppress(Exception):
        facts["driver"] = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    with contextlib.suppress(Exception):
        facts |= _torch_facts()
    return facts


def _versions() -> dict[str, str]:
    from importlib import metadata

    wanted = ("fullshard", "torch", "transformers", "peft", "datasets", "safetensors", "tokenizers", "triton", "numpy")
    found = {}
    for name in wanted:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _torch_facts() -> dict[str, Any]:
    torch = sys.modules["torch"]  # not imported just for this
    facts: dict[str, Any] = {"cuda": torch.version.cuda}
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def _tail(path: Path, count: int) -> list[str]:
    with contextlib.suppress(OSError):
        return tail(path).splitlines()[-count:]
    return []


def tail(path: Path, *, size: int = 4 * 2**20) -> str:
    """The end of a text file that may be huge."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - size, 0))
        return file.read().decode("utf-8", errors="replace")


def _last_step(folder: Path) -> int | None:
    for line in reversed(_tail(folder / "metrics.jsonl", _METRICS_LINES)):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["step"])
    return None


def last_words(error: BaseException, crash: Path | None) -> str:
    """The last lines on the console: the explanation of an error, or that it is unknown, and the crash folder."""
    matches = explain_exception(error)
    # Our own guards explain themselves.
    return f"\n{_place(crash)}" if isinstance(error, FullshardError) and not matches else closing(matches, crash)


def closing(matches: Sequence[Match], crash: Path | None) -> str:
    """The explanation that ends a run, and its crash folder."""
    if matches:
        text = answer(matches)
    else:
        text = (
            "fullshard does not know this error. The last lines of the traceback say what failed;\n"
            "`fullshard check RECIPE` checks the setup, and `fullshard explain` lists the known errors."
        )
    return f"\n{text}\n\n{_place(crash)}"


def _place(crash: Path | None) -> str:
    return f"Crash folder: {crash}" if crash else "A crash folder could not be written."


def left_behind(crash: Path) -> dict[int, LastWords]:
    """What each rank wrote into a crash folder."""
    files = sorted(crash.glob("rank-*.txt"), key=lambda path: path.stat().st_mtime)
    ranks = {int(path.stem.removeprefix("rank-")): path for path in files if path.stem[5:].isdigit()}
    return {rank: LastWords(path.read_text(encoding="utf-8", errors="replace"), crash) for rank, path in ranks.items()}


def culprit(said: Mapping[int, LastWords], *, otherwise: int) -> int:
    """The rank whose words name the cause. A rank that only lost its peers, or waited for them in vain, is a victim;
    `otherwise` wins if it is not a victim, or if all are."""
    guilty = [rank for rank, words in said.items() if words.text and not is_victim(words.text)]
    return otherwise if otherwise in guilty or not guilty else guilty[0]


def is_reported_elsewhere(error: BaseException) -> bool:
    """Whether an error only follows from the end of another rank, which the launcher reports."""
    with contextlib.suppress(Exception):
        reported = REPORTED_BY_LAUNCHER in os.environ
        return reported and (lost_a_rank(error) or is_victim("".join(traceback.format_exception(error))))
    return False


def lost_a_rank(error: BaseException) -> bool:
    """Whether an error was raised because another rank went away. That is never the user's mistake, even if it looks
    like one: a store that cannot be reached, a file that another rank did not write."""
    cause: BaseException | None = error
    while cause is not None:
        # gloo, NCCL and the store raise RuntimeErrors; a hub or a remote store that hangs up has other ones.
        if isinstance(cause, RuntimeError) and is_victim(f"{type(cause).__name__}: {cause}"):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def is_victim(text: str) -> bool:
    """Whether a rank's words only say that it lost another one."""
    matches = explain(text)
    return bool(matches) and matches[0].entry.role == "consequence"
