"""The faults that the checks must turn red, one file for each theme. Importing this loads neither torch nor Lightning.

To add a fault: write its context in the file of its theme (``replaced`` does most of it; what needs torch is imported
inside) and an entry in that file's tuple; a new theme is a new file, listed below.
"""

from __future__ import annotations

from smoke.config import nearest
from smoke.faults import (
    attention,
    baseline,
    conversion,
    data,
    kernels,
    ledgers,
    numbers,
    replay,
    rope,
    saved,
    steps,
    timing,
    watchers,
)
from smoke.faults.fault import SMALL, Fault, active, injected, replaced, small_config

__all__ = ["FAULTS", "SMALL", "Fault", "active", "by_name", "injected", "replaced", "small_config"]

FAULTS: tuple[Fault, ...] = (
    *conversion.FAULTS,
    *replay.FAULTS,
    *numbers.FAULTS,
    *data.FAULTS,
    *rope.FAULTS,
    *ledgers.FAULTS,
    *watchers.FAULTS,
    *timing.FAULTS,
    *kernels.FAULTS,
    *saved.FAULTS,
    *attention.FAULTS,
    *steps.FAULTS,
    *baseline.FAULTS,
)
"""In the order of ``smoke selftest``."""


def by_name(name: str) -> Fault:
    """The fault of that name. Raises LookupError, whose text names the nearest one."""
    found = {fault.name: fault for fault in FAULTS}
    if name not in found:
        raise LookupError(f"no fault {name!r}; the nearest is {nearest(name, found)}")
    return found[name]
