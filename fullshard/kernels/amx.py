"""Which of the processor's instructions bf16 products use. Must not know torch, models or recipes."""

from __future__ import annotations

import os
import re
from pathlib import Path


def avoid_broken_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Stops oneDNN from using AMX on a virtual machine, unless ONEDNN_MAX_CPU_ISA says what to use.

    Some hypervisors announce AMX but hide its tiles (CPUID leaf 0x1D is empty). oneDNN does not look there, and the
    first bf16 product ends the process with SIGILL (github.com/uxlfoundation/oneDNN/issues/5689). Call this before
    that product: oneDNN decides once which instructions it uses."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    if flags and {"amx_bf16", "hypervisor"} <= set(flags[1].split()):
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
