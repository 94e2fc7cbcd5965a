"""quantizer, absorbed_parity, packed_parity and finite: known answers, twin forms, and numbers that are numbers."""

from __future__ import annotations

import math
from typing import Any

from smoke.checks.finding import Finding, failed, number, passed, unable, worst
from smoke.record import Record

FINITE_KINDS = ("loss", "input", "output_gradient", "gradient", "weight")
"""What has to be looked at: inputs and output gradients of the leaves are where a cast can still hide a NaN."""
TWIN_ERROR_MAX = 1e-9
"""In float64 two mathematically equal forms differ by rounding alone, about 1e-13 over these depths."""


def quantizer(record: Record, plan: Any, limits: Any) -> Finding:
    """Known answers through the live recipe's own quantizers, bit for bit."""
    name, limit = "quantizer", "every code and scale equal to the known answer"
    if not record.quantizer:
        return unable(name, "measured nothing: no known-answer case ran")
    for row in record.quantizer:
        if row.mismatches:
            return failed(name, f"{row.mismatches} of {row.elements} differ", limit, row.case, row.detail)
        if row.elements < 1:
            return unable(name, "the case compared nothing", row.case)
    elements = sum(row.elements for row in record.quantizer)
    return passed(name, f"0 of {elements:,} differ, {len(record.quantizer)} cases", limit)


def absorbed_parity(record: Record, plan: Any, limits: Any) -> Finding:
    """The absorbed form of attention against the plain form of the same weights, in float64."""
    rows = [row for row in record.twins if row.kind == "absorbed"]
    if rows and not any(row.relative_error for row in rows):
        return unable("absorbed_parity", "both forms gave the same bits everywhere: one form ran twice")
    return _twins("absorbed_parity", record, "absorbed")


def packed_parity(record: Record, plan: Any, limits: Any) -> Finding:
    """Packed sequences against the same sequences apart, in float64; a change of one leaks into no other."""
    if not any(row.kind == "packed_leak" for row in record.twins):
        return unable("packed_parity", "measured nothing: no sequence was changed to see what leaks")
    for row in record.twins:
        if row.kind == "packed_leak" and row.relative_error != 0.0:
            return failed(
                "packed_parity", number(row.relative_error), "exactly 0", row.tensor, "a sequence sees another one"
            )
    return _twins("packed_parity", record, "packed")


def _twins(name: str, record: Record, kind: str) -> Finding:
    rows = [row for row in record.twins if row.kind == kind]
    if not rows:
        return unable(name, f"measured nothing: no {kind} twin was compared")
    top = worst(rows, lambda row: row.relative_error)
    limit = f"relative error <= {number(TWIN_ERROR_MAX)} in float64"
    if not top.relative_error <= TWIN_ERROR_MAX:
        over = sum(not row.relative_error <= TWIN_ERROR_MAX for row in rows)
        return failed(name, number(top.relative_error), limit, top.tensor, f"{over} of {len(rows)} tensors over")
    return passed(name, f"{number(top.relative_error)}, {len(rows)} tensors", limit, f"worst: {top.tensor}")


def finite(record: Record, plan: Any, limits: Any) -> Finding:
    """No NaN or infinity in any loss, gradient, weight or input of a leaf, seen before quantization."""
    name, limit = "finite", "no NaN, no infinity, and labels in every batch"
    if record.finite:
        row = record.finite[0]
        detail = f"{len(record.finite)} tensors in all" if len(record.finite) > 1 else ""
        return failed(name, f"{row.nan} NaN, {row.inf} inf", limit, f"step {row.step} {row.kind} {row.name}", detail)
    for step in record.steps:
        if step.tokens < 1:
            return failed(name, "0 label tokens", limit, f"step {step.step} batch", "every label is ignored")
        for what, value in (("loss", step.loss), ("gradient norm", step.grad_norm)):
            if not math.isfinite(value):
                return failed(name, str(value), limit, f"step {step.step} {what}")
    if not record.steps or record.finite_looked < 1:
        return unable(name, f"measured nothing: {len(record.steps)} steps, {record.finite_looked} tensors looked at")
    missing = [kind for kind in FINITE_KINDS if kind not in record.finite_kinds]
    if missing:
        return unable(name, f"looked at no {missing[0]}")
    if record.finite_steps < len(record.steps):
        return unable(name, f"looked at {record.finite_steps} of {len(record.steps)} steps")
    return passed(name, f"{record.finite_looked:,} tensors in {record.finite_steps} steps", limit)
