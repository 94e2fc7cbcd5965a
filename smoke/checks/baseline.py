"""baseline: the losses of a reviewed earlier run to the last bit, and its costs up to their own noise.

**Losses** have no tolerance: on one toolchain and device the same steps give the same bits. A step is equal only where
both sides have it, both hexadecimal forms are the same, and the number is finite.

**Costs** (tokens a second, memory) are never the same twice, so their limit comes from the spread of the recorded runs:
the one-sided prediction interval of the next value, ``mean +- t(n - 1) s sqrt(1 + 1/n)``, where t leaves out one in a
thousand of normal noise. Few or noisy runs give a wide limit by themselves; fewer than three give none. A floor keeps
runs that happened to agree from making an alarm of a difference that nobody would act on. Only for the worse: what is
faster or smaller passes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from smoke.checks.finding import SKIP, Finding, failed, number, passed, unable
from smoke.record import Record
from smoke.record.baseline import BaselineRows, CostRow

STUDENT_T = (10.2, 7.17, 5.89, 5.21, 4.79, 4.50, 4.30, 4.14, 4.02, 3.93, 3.85, 3.79, 3.73, 3.69, 3.65, 3.61, 3.58)
"""Quantile 0.999 of Student's t with 3 to 19 degrees of freedom."""
STUDENT_T_2 = 22.3
LEAST_RUNS, MOST_RUNS = 3, 20
"""Recorded runs from which a cost is judged, and how many are kept."""
FLOORS = {"tokens_per_s": 0.05, "peak_gib": 0.05, "held_mib": 0.001}
"""Least relative distance of a limit from the mean. Held bytes are counted, not measured: they have no noise."""
MORE_IS_BETTER = ("tokens_per_s",)
UNITS = {"tokens_per_s": "tokens/s", "peak_gib": "GiB peak", "held_mib": "MiB held"}
LIMIT = "every loss bit-equal, no step missing or extra"


def baseline(record: Record, plan: Any, limits: Any) -> Finding:
    """The run repeats the recorded one of its toolchain, device, configuration and data."""
    name, known = "baseline", record.baseline
    if known is None:
        return unable(name, "measured nothing: no baseline was read")
    if known.outside:
        return Finding(name=name, status=SKIP, detail=known.outside)
    if not record.steps or not known.losses:
        return unable(name, "compared nothing: the run or the baseline has no step")
    differences = list(loss_differences(record, known))
    steps = len({row.step for row in record.steps} | {step for step, _ in known.losses})
    measured = f"{len({step for step, _ in differences})} of {steps} losses differ{_costs_measured(known)}"
    limit = LIMIT + "".join(f"; {words}" for words in map(cost_limit, known.costs) if words)
    for step, words in differences:
        return failed(name, measured, limit, f"step {step}", words)
    worse = [cost.quantity for cost in known.costs if is_worse(cost)]
    if worse:
        return failed(name, measured, limit, ", ".join(worse), "worse than the recorded runs by more than their noise")
    return passed(name, measured, limit)


def loss_differences(record: Record, known: BaselineRows) -> Iterator[tuple[int, str]]:
    """Every step whose loss is not the recorded one, in order, and what is wrong with it."""
    here: dict[int, list[str]] = {}
    for row in record.steps:
        here.setdefault(row.step, []).append(row.loss_hex)
    there: dict[int, list[str]] = {}
    for step, loss in known.losses:
        there.setdefault(step, []).append(loss)
    for step in sorted(here.keys() | there.keys()):
        words = _difference(here.get(step, []), there.get(step, []))
        if words:
            yield step, words


def _difference(here: list[str], there: list[str]) -> str:
    if not here:
        return "in the baseline, missing in this run"
    if not there:
        return "not in the baseline"
    if len(here) > 1 or len(there) > 1:
        return "stands more than once"
    if not math.isfinite(float.fromhex(here[0])):
        return f"the loss is {here[0]}, {there[0]} recorded; what is not finite equals nothing"
    return "" if here == there else f"loss {here[0]}, {there[0]} recorded"


def bound(recorded: Sequence[float], floor: float, *, lower: bool) -> float | None:
    """Least (or largest) value that the recorded ones explain; None where there are too few of them."""
    count = len(recorded)
    if count < LEAST_RUNS:
        return None
    freedom = count - 1
    quantile = STUDENT_T_2 if freedom < 3 else STUDENT_T[min(freedom - 3, len(STUDENT_T) - 1)]
    mean = statistics.fmean(recorded)
    distance = max(quantile * statistics.stdev(recorded) * math.sqrt(1 + 1 / count), floor * mean)
    return mean - distance if lower else mean + distance


def cost_bound(cost: CostRow) -> float | None:
    """The limit of one cost."""
    return bound(cost.recorded, FLOORS[cost.quantity], lower=cost.quantity in MORE_IS_BETTER)


def is_worse(cost: CostRow) -> bool:
    """Whether a cost is past its limit; a NaN is. What was not measured, or has no limit, is not."""
    limit = cost_bound(cost)
    if limit is None or cost.value is None:
        return False
    return not (cost.value >= limit if cost.quantity in MORE_IS_BETTER else cost.value <= limit)


def cost_limit(cost: CostRow) -> str:
    """The limit of one cost in words; empty where it has none."""
    limit = cost_bound(cost)
    if limit is None or cost.value is None:
        return ""
    sign = ">=" if cost.quantity in MORE_IS_BETTER else "<="
    return f"{sign} {number(limit)} {UNITS[cost.quantity]} ({len(cost.recorded)} runs)"


def _costs_measured(known: BaselineRows) -> str:
    return "".join(f", {number(cost.value)} {UNITS[cost.quantity]}" for cost in known.costs if cost.value is not None)
