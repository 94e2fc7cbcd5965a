"""rope_contract: the rotary embedding against float64, and the ways in which its kernels break."""

from __future__ import annotations

from typing import Any

from smoke.checks.finding import Finding, failed, number, passed, unable
from smoke.record import Record, RopeRow

POSITIONS = (0, 1, 4096, 16384)
"""Tokens from a sequence's start: two that show little, the end of DeepSeek-V3's original context, one far beyond."""
ERRORS_MAX = {"table": 1.0, "scale": 8.0, "forward": 3.0, "gradient": 3.0}
"""In rounding units. A table is rounded once (0.5); a rotation adds two rounded tables, two products, a sum and, in the
shared key's gradient, the sum over the heads (1.4 seen, of at most 3). A wrong formula is off by thousands."""
COUNTS = ("unwritten", "outside", "input", "repeat", "positions")


def rope_contract(record: Record, plan: Any, limits: Any) -> Finding:
    """Tables, scales, values and gradients near float64; every element written, once, inside, and again the same."""
    name, rows = "rope_contract", record.rope
    limit = f"error <= {number(ERRORS_MAX['forward'])} rounding units (tables 1); no element wrong"
    wrong = [row for row in rows if not _holds(row)]
    if wrong:
        kinds = ", ".join(dict.fromkeys(row.kind for row in wrong))
        detail, row = f"{len(wrong)} of {len(rows)} rows: {kinds}", wrong[0]
        return failed(name, f"{row.kind} {number(row.value)}", limit, _place(row), detail)
    gap = _gap(rows, plan)
    if gap:
        return unable(name, gap)
    worst = max((row.value for row in rows if row.kind in ("forward", "gradient")), default=0.0)
    cases = len({row.case for row in rows})
    return passed(name, f"worst {number(worst)} rounding units, {len(rows)} rows of {cases} cases", limit)


def _holds(row: RopeRow) -> bool:
    return row.value == 0.0 if row.kind in COUNTS else row.value <= ERRORS_MAX.get(row.kind, -1.0)


def _gap(rows: list[RopeRow], plan: Any) -> str:
    """What was not measured; empty when everything was."""
    kernels = any(row.case.startswith("triton") for row in rows) or plan.impl == "triton"
    for kind in (*ERRORS_MAX, *COUNTS):
        if not any(row.kind == kind for row in rows) and (kind != "outside" or kernels):
            return f"measured nothing of the kind {kind}"
    for position in POSITIONS:
        if not any(row.kind == "table" and row.position == position for row in rows):
            return f"no table compared at position {position}"
    return ""


def _place(row: RopeRow) -> str:
    at = "" if row.position is None else f" at position {row.position}"
    return f"{row.tensor}{at} ({row.case})"
