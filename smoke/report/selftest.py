"""What ``smoke selftest`` prints and leaves behind: a row for each run, one verdict, one JSON file.

A run without a fault must be green; a run with one must be red exactly where the fault says. A row is PASS, FAIL (the
fault was missed, seen at the wrong place, or another check is red too), ERROR (the run crashed) or SKIP (this machine
cannot show it). Exit codes are those of a run, but a skipped row does not count: what it needs is not asked for here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smoke import __version__
from smoke.checks import ERROR, FAIL, PASS
from smoke.record import plain

SELFTEST_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SelftestRow:
    """One run."""

    fault: str
    """Its name; empty for a run without a fault."""
    row: int
    """Row of the list of faults, 0 for one met since."""
    summary: str
    config: str
    """Precision, recompute and layout of the run."""
    expected: tuple[str, ...]
    """Checks that must be red."""
    may_follow: tuple[str, ...]
    red: tuple[str, ...]
    """Checks that were red."""
    status: str
    where: str
    """Place that the first expected check gave."""
    detail: str
    """What is wrong with the row; empty when nothing is."""
    seconds: float


def selftest_exit(rows: Sequence[SelftestRow]) -> tuple[str, int]:
    """Verdict and exit code: 3 for a crash, 1 for a fault that was not shown as it must, 4 when nothing was shown."""
    statuses = {row.status for row in rows}
    if ERROR in statuses:
        return "error", 3
    if FAIL in statuses:
        return "fail", 1
    return ("pass", 0) if any(row.status == PASS and row.fault for row in rows) else ("unsupported", 4)


def selftest_line(rows: Sequence[SelftestRow], verdict: str, code: int) -> str:
    """The last line."""
    faults = [row for row in rows if row.fault]
    good = sum(row.status == PASS for row in faults)
    green = sum(row.status == PASS for row in rows if not row.fault)
    skipped = sum(row.status == "SKIP" for row in faults)
    also = f", {skipped} skipped" if skipped else ""
    sound = f"{green} of {len(rows) - len(faults)} runs without a fault green"
    return f"{verdict}: {good} of {len(faults)} faults shown red where they must be{also}; {sound} (exit code {code})"


def selftest_json(
    rows: Sequence[SelftestRow], verdict: str, code: int, *, command: Sequence[str], environment: Any
) -> str:
    """selftest.json."""
    tree: Mapping[str, Any] = {
        "schema_version": SELFTEST_SCHEMA_VERSION,
        "smoke": __version__,
        "verdict": verdict,
        "exit_code": code,
        "command": list(command),
        "environment": environment,
        "rows": list(rows),
    }
    return json.dumps(plain(tree), indent=1, allow_nan=False) + "\n"
