"""gradient_parity, quantization_engaged and gradient_presence.

Against BF16 both sides matter: an upper limit says too wrong, a lower limit says quantization did not happen.

A gradient that nearly cancels in one step (a norm weight, the query path of one head) can be far off there without any
fault of a quantized run, so each parameter and each slice is judged by the median of its errors over the compared steps
(the lower one of two). What no single step excuses is the median over all parameters, which has a limit of its own at
every step. With routing free an expert can win or lose its only token, so single parameters say little there: the limit
is on the error of all gradients together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from smoke.checks.finding import Finding, failed, median, number, passed, quantizes, unable, worst
from smoke.record import GradientRow, Record

UPPER = (
    "gradient_error_max",
    "gradient_error_slice_max",
    "gradient_error_median_max",
    "gradient_error_free_max",
)


def gradient_parity(record: Record, plan: Any, limits: Any) -> Finding:
    """Errors of parameters, of slices, and of all gradients with routing free; the median is not too small either."""
    name, rows = "gradient_parity", record.gradients
    replayed = [row for row in rows if row.routing == "replayed"]
    whole, slices = [r for r in replayed if not r.slice], [r for r in replayed if r.slice]
    free = [row for row in rows if row.routing == "free" and not row.slice]
    problem = _unmeasured(record, whole, slices, free, plan, limits)
    if problem:
        return unable(name, problem)
    broken = next((row for row in rows if not _usable(row)), None)
    if broken is not None:
        return failed(name, _numbers(broken), "finite", _place(broken), "gradient comparison is not finite")
    typical = [_typical(rows) if quantizes(plan) else rows for rows in (whole, slices)]
    found = _first_red(name, whole, typical, free, limits)
    if found is not None:
        return found
    top, *part = (worst(rows, _error) for rows in typical if rows)
    measured = [number(top.relative_error), *(f"slice {number(row.relative_error)}" for row in part)]
    measured += [
        f"median {number(max(_medians(whole).values()))}",
        *([f"free {number(_together(free))}"] if free else []),
    ]
    places = "; ".join(_place(row) for row in (top, *part))
    return passed(name, ", ".join(measured), _upper_limits(limits, plan), f"worst: {places}")


def _unmeasured(
    record: Record,
    whole: Sequence[GradientRow],
    slices: Sequence[GradientRow],
    free: Sequence[GradientRow],
    plan: Any,
    limits: Any,
) -> str:
    """Why the rows do not suffice; empty when they do."""
    for rows, kind, what in (
        (whole, "parameter", "parameter"),
        (slices, "slice", "slice"),
        (free, "free", "parameter with routing free"),
    ):
        if not rows and kind in plan.compared:
            return f"measured nothing: no {what} was compared"
    steps = {row.step for row in whole}
    for step in range(plan.recipe.warmup_steps, plan.config.steps, plan.config.check.gradient_parity_every):
        if step not in steps:
            return f"no comparison at step {step}"
    names = {row.parameter for row in record.presence} | {row.parameter for row in whole}
    for step in sorted(steps):
        missing = sorted(names - {row.parameter for row in whole if row.step == step})
        if missing:
            return f"{missing[0]} was not compared at step {step}"
    for field in UPPER:
        if getattr(limits, field) is None:
            return f"the recipe has no {field}"
    return ""


def _first_red(
    name: str,
    whole: Sequence[GradientRow],
    typical: Sequence[Sequence[GradientRow]],
    free: Sequence[GradientRow],
    limits: Any,
) -> Finding | None:
    for rows, most in zip(typical, (limits.gradient_error_max, limits.gradient_error_slice_max), strict=True):
        if not rows:
            continue
        top = worst(rows, _error)
        if not top.relative_error <= most:
            over = sum(not row.relative_error <= most for row in rows)
            limit = f"median of the steps' relative errors <= {number(most)}"
            return failed(name, _numbers(top), limit, _place(top), f"{over} of {len(rows)} over")
    for step, middle in _medians(whole).items():
        if not middle <= limits.gradient_error_median_max:
            limit = f"median of all parameters <= {number(limits.gradient_error_median_max)}"
            place = _place(worst([row for row in whole if row.step == step], _error))
            return failed(name, f"median relative error {number(middle)}", limit, place, f"step {step}")
    together, most = _together(free) if free else 0.0, limits.gradient_error_free_max
    if not together <= most:
        place = _place(worst(free, _error))
        return failed(name, f"all gradients, routing free: {number(together)}", f"<= {number(most)}", place)
    least, quantized = limits.gradient_error_min, [r for r in whole if r.quantized and r.reference_norm > 0]
    if least and quantized:
        middle = median([row.relative_error for row in quantized])
        if not middle >= least:
            place = _place(min(quantized, key=_error))
            return failed(name, f"median of quantized parameters {number(middle)}", f">= {number(least)}", place)
    return None


def _usable(row: GradientRow) -> bool:
    """Finite numbers; with routing free a reference of zero makes the relative error infinite, which is no fault."""
    numbers = (row.cosine, row.norm, row.reference_norm)
    free_of_zero = row.routing == "free" and row.reference_norm == 0
    return all(map(math.isfinite, numbers)) and (math.isfinite(row.relative_error) or free_of_zero)


def _together(rows: Sequence[GradientRow]) -> float:
    """Relative error of all gradients taken as one vector; the largest over the steps."""
    errors = []
    for step in {row.step for row in rows}:
        chosen = [row for row in rows if row.step == step]
        difference = math.hypot(*(row.relative_error * row.reference_norm if row.reference_norm else row.norm
                                  for row in chosen))  # fmt: skip
        reference = math.hypot(*(row.reference_norm for row in chosen))
        errors.append(difference / reference if reference else (0.0 if difference == 0 else math.inf))
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def _typical(rows: Sequence[GradientRow]) -> list[GradientRow]:
    """For each parameter or slice, the row with the (lower) median error over its steps; NaN sorts last."""
    found: dict[tuple[str, str], list[GradientRow]] = {}
    for row in rows:
        found.setdefault((row.parameter, row.slice), []).append(row)
    return [sorted(group, key=_order)[(len(group) - 1) // 2] for group in found.values()]


def _order(row: GradientRow) -> float:
    return math.inf if math.isnan(row.relative_error) else row.relative_error


def _medians(rows: Sequence[GradientRow]) -> dict[int, float]:
    """Median error of all parameters at each step."""
    return {step: median([row.relative_error for row in rows if row.step == step]) for step in {r.step for r in rows}}


def _upper_limits(limits: Any, plan: Any) -> str:
    middle = f"median {number(limits.gradient_error_min)} to " if limits.gradient_error_min else "median <= "
    whole, part, free = limits.gradient_error_max, limits.gradient_error_slice_max, limits.gradient_error_free_max
    words = [f"<= {number(whole)}", *([f"slice <= {number(part)}"] if "slice" in plan.compared else [])]
    words += [f"{middle}{number(limits.gradient_error_median_max)}"]
    return ", ".join(words + ([f"free <= {number(free)}"] if "free" in plan.compared else []))


def quantization_engaged(record: Record, plan: Any, limits: Any) -> Finding:
    """Every quantized parameter's gradient differs from BF16's by at least the recipe's lower limit."""
    name, least = "quantization_engaged", limits.gradient_error_min
    whole = [row for row in record.gradients if row.routing == "replayed" and not row.slice]
    if not quantizes(plan) or not least:
        return unable(name, "the recipe has no lower limit (gradient_error_min)")
    if not whole:
        return unable(name, "measured nothing: no gradient was compared")
    limit = f"relative error >= {number(least)} for every quantized parameter"
    errors: dict[str, list[float]] = {}
    for row in whole:
        if row.quantized and not (row.norm == 0 and row.reference_norm == 0):
            errors.setdefault(row.parameter, []).append(row.relative_error)
    if not errors:
        return failed(name, "0 quantized parameters", limit, detail="conversion matched nothing")
    for parameter, values in errors.items():
        if not max(values, key=lambda value: -math.inf if math.isnan(value) else value) >= least:
            return failed(name, number(max(values)), limit, parameter, "its gradient is that of the BF16 twin")
    return passed(name, f"least {number(min(max(v) for v in errors.values()))}, {len(errors)} parameters", limit)


def gradient_presence(record: Record, plan: Any, limits: Any) -> Finding:
    """Every parameter had a gradient that is not zero in every step in which one was expected."""
    name, limit = "gradient_presence", "a gradient that is not zero in every step where one is expected"
    expected = [row for row in record.presence if row.steps > 0]
    if not expected:
        return unable(name, "measured nothing: no gradient was expected in any step")
    for row in record.presence:
        if row.steps < 1 and not row.may_be_zero:
            return unable(name, "not looked at in any step", row.parameter)
        if row.present_steps < row.steps:
            return failed(name, f"present in {row.present_steps} of {row.steps} steps", limit, row.parameter)
        if row.nonzero_steps < row.steps:
            return failed(name, f"not zero in {row.nonzero_steps} of {row.steps} steps", limit, row.parameter)
    idle = len(record.presence) - len(expected)
    return passed(name, f"{len(expected)} parameters" + (f", {idle} idle in every step" if idle else ""), limit)


def _error(row: GradientRow) -> float:
    return row.relative_error


def _numbers(row: GradientRow) -> str:
    norms = f"norms {number(row.norm)} and {number(row.reference_norm)}"
    return f"relative error {number(row.relative_error)}, cosine {row.cosine:.6f}, {norms}"


def _place(row: GradientRow) -> str:
    inside = f"[{row.slice}]" if row.slice else ""
    return f"{row.parameter}{inside} step {row.step} ({row.routing} routing)"
