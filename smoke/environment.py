"""What is here: facts about this machine, in one frozen value. No decision is made in this file."""

from __future__ import annotations

import functools
import pathlib


@functools.cache
def cpu_flags() -> tuple[str, ...]:
    """Instruction-set flags of the CPU as the kernel lists them (empty where there is no /proc/cpuinfo)."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted(value.split()))
    return ()


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies BF16 matrices in hardware (AVX512-BF16, AMX-BF16, or Arm BF16)."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(cpu_flags()))
