"""How many GPUs a new process would see now. Must not import torch here: this process remembers what it saw first."""

from __future__ import annotations

import subprocess
import sys

_COUNT = "import torch; print(torch.cuda.device_count())"


def gpus_now() -> int:
    """The GPUs that are left of those that ranks of this process may use; 0 if CUDA cannot be asked."""
    try:
        asked = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=300)
        return int(asked.stdout.split()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return 0
