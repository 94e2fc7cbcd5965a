"""accumulation_parity and resume_parity: a step in parts is the step, and a run in parts is the run."""

from __future__ import annotations

from typing import Any

from smoke.checks.finding import Finding, failed, number, passed, unable, worst
from smoke.record import Record

ACCUMULATION_ERROR_MAX = 1e-9
"""In float64 the two orders of the same additions differ by rounding alone, about 1e-14."""
PARTS = ("state_dict", "optimizer_states", "loops", "callback LossTracker", "callback RandomStates")
"""What a checkpoint must hold for the comparison to mean anything."""


def accumulation_parity(record: Record, plan: Any, limits: Any) -> Finding:
    """k micro-batches with unevenly many labels give the loss and the gradients of one batch that holds them all."""
    name, rows = "accumulation_parity", record.accumulation
    limit = f"relative error <= {number(ACCUMULATION_ERROR_MAX)} in float64"
    if not any(row.name == "" for row in rows) or not any(row.name for row in rows):
        return unable(name, "measured nothing: no loss or no gradient was compared")
    for row in rows:
        if row.micro_batches < 2 or row.elements < 1:
            return unable(name, f"compared {row.micro_batches} micro-batches, {row.elements} elements", row.name)
    top = worst(rows, lambda row: row.relative_error)
    where = f"gradient of {top.name}" if top.name else "loss"
    if not top.relative_error <= ACCUMULATION_ERROR_MAX:
        over = sum(not row.relative_error <= ACCUMULATION_ERROR_MAX for row in rows)
        return failed(name, number(top.relative_error), limit, where, f"{over} of {len(rows)} tensors over")
    measured = f"{number(top.relative_error)}, {len(rows)} tensors, {top.micro_batches} micro-batches"
    return passed(name, measured, limit, f"worst: {where}")


def resume_parity(record: Record, plan: Any, limits: Any) -> Finding:
    """After the first and after the second resume, the checkpoint is that of the run that never stopped."""
    name, rows = "resume_parity", record.resumed
    limit = "every value of the checkpoint equal, after one and after two resumes; times apart"
    differing = [row for row in rows if row.differing]
    compared = sum(row.compared for row in rows)
    if differing:
        row = differing[0]
        where = f"resume {row.resumes}, step {row.step}: {row.part} {row.first}"
        others = ", ".join(dict.fromkeys(row.part for row in differing[1:]))
        detail = f"{row.whole} without a stop, {row.resumed} resumed" + (f"; also {others}" if others else "")
        return failed(
            name, f"{sum(row.differing for row in rows):,} of {compared:,} values differ", limit, where, detail
        )
    for resumes in (1, 2):
        parts = {row.part for row in rows if row.resumes == resumes and row.compared > 0}
        missing = [part for part in PARTS if part not in parts]
        if missing:
            return unable(name, f"{missing[0]} not compared after resume {resumes}")
    return passed(name, f"0 of {compared:,} values differ, 2 resumes", limit)
