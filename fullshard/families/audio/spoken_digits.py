"""Words spoken by espeak-ng, a program of the machine. Must not know records, tokens or ranks."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from fullshard.errors import SetupError, missing_package

PROGRAM = "espeak-ng"


def has_espeak() -> bool:
    """Whether the program is installed."""
    return shutil.which(PROGRAM) is not None


def check_espeak() -> str:
    """The version of the program: another one may speak differently."""
    if not has_espeak():
        raise SetupError(
            f"data: digits = spoken needs the program {PROGRAM}, which is not installed. Install it with: apt-get "
            f"install {PROGRAM}. Or set digits: dialled, which needs no program."
        )
    return subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout.strip()


@functools.lru_cache(maxsize=512)
def speak(word: str, *, speed: int, pitch: int, rate: int) -> np.ndarray:
    """The word as samples at this rate, without silence around it."""
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: the package without its C library
        raise missing_package("soundfile", extra="audio", needed_by="reading audio") from error
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "word.wav"
        subprocess.run(
            [PROGRAM, "-v", "en", "-s", str(speed), "-p", str(pitch), "-w", str(file), word],
            check=True,
            capture_output=True,
        )
        samples, own = soundfile.read(file, dtype="float32")
    loud = np.flatnonzero(np.abs(samples) > 0.01)
    samples = samples[loud[0] : loud[-1] + 1]
    return np.asarray(soxr.resample(samples, own, rate) / np.abs(samples).max(), dtype=np.float32)


__all__ = ["check_espeak", "has_espeak", "speak"]
