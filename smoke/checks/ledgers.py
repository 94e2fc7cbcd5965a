"""weight_freshness: the weights that are multiplied are those of this step."""

from __future__ import annotations

from typing import Any

from smoke.checks.finding import Finding, failed, passed, unable
from smoke.record import Record

DIRECTIONS = {"output": "row", "grad_input": "col"}
"""GEMMs that multiply the weight, and the direction of its operand there."""


def weight_freshness(record: Record, plan: Any, limits: Any) -> Finding:
    """Every weight operand that was looked at is a fresh quantization of the live Parameter, bit for bit."""
    name, rows = "weight_freshness", record.freshness
    limit = "every operand equal to a fresh quantization of the live weight, after an update"
    if not rows and record.coverage and not any(row.quantized_calls for row in record.coverage):
        return failed(name, "0 quantized weights", limit, detail="conversion matched nothing")
    if not rows:
        return unable(name, "measured nothing: no weight operand was compared")
    stale = sum(row.stale for row in rows)
    measured = f"{stale} of {sum(row.operands for row in rows):,} operands stale"
    for row in sorted(rows, key=lambda row: row.step):
        where = f"step {row.step} {row.module}.{row.parameter or 'weight'} ({row.direction} operand)"
        if row.stale:
            return failed(name, measured, limit, where, f"{row.used_hex} multiplied, {row.fresh_hex} when made anew")
        if row.operands < 1 or row.elements < 1:
            return unable(name, "the comparison covered no element", where)
        if row.step < 1:
            return unable(name, "compared before any update", where)
    compared = {(row.module, row.direction) for row in rows}
    for gemm in record.coverage:
        direction = DIRECTIONS.get(gemm.gemm)
        if direction and gemm.planned and gemm.quantized_calls and (gemm.module, direction) not in compared:
            return unable(name, f"its {direction} operand was never compared", gemm.module)
    steps = len({row.step for row in rows})
    return passed(name, f"{measured}, {len({row.module for row in rows})} modules, {steps} steps", limit)
