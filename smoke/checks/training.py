"""loss_tracking, throughput and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from smoke.checks.finding import Finding, failed, median, number, passed, quantizes, unable
from smoke.record import LossCurves, MemoryRow, Record, StepRow, ThroughputSummary, percentile

WARM_STEPS = 5
"""Steps before the gap to the twin counts, and steps at each end whose mean must fall."""
FLOOR_FACTOR = 3
"""How many times the BF16 noise floor the gap may be."""
SUM_ERROR_MAX = 1e-4
"""Relative: float32 cross entropy against float64, over some thousand labels."""
LABELS = {"emulated": "emulation", "mixed": "emulation", "native": "native", "bf16": "bf16"}


def loss_tracking(record: Record, plan: Any, limits: Any) -> Finding:
    """The loss falls, and stays as near the BF16 twin as noise or the recipe allows (but is not the twin's)."""
    name, curves = "loss_tracking", record.curves
    problem = _curve_problem(record)
    if problem:
        return unable(name, problem)
    if limits.loss_gap_max is None:
        return unable(name, "the recipe has no loss_gap_max")
    gap = _gap(curves.run, curves.twin)
    floor = median([abs(a - b) for p in curves.perturbed for a, b in _late(p, curves.twin)])
    allowed = max(FLOOR_FACTOR * floor, limits.loss_gap_max)
    first, last = _mean(curves.run[:WARM_STEPS]), _mean(curves.run[-WARM_STEPS:])
    measured = f"median gap {number(gap)} nats, loss {first:.4f} -> {last:.4f}"
    limit = f"gap <= {number(allowed)} (floor {number(floor)}), loss falls"
    problem, where = _loss_problem(record, plan, gap, allowed, first, last)
    if problem:
        return failed(name, measured, limit, where, problem)
    other = f"another seed's gap: {number(_gap(curves.other_seed, curves.twin))}" if curves.other_seed else ""
    return passed(name, measured, limit, detail=other)


def _curve_problem(record: Record) -> str:
    """Why the curves cannot be judged; empty when they can."""
    curves, steps = record.curves, record.steps
    if not curves.run or not curves.twin or not curves.perturbed:
        return "measured nothing: the run, its twin or the noise floor has no curve"
    lengths = {len(curves.run), len(curves.twin), *map(len, curves.perturbed)}
    if len(lengths) > 1:
        return f"curves of different lengths: {sorted(lengths)}"
    if record.loss_sums is not None and len(record.loss_sums) != len(curves.run):
        return f"{len(record.loss_sums)} losses from sums, {len(curves.run)} steps"
    if len(curves.run) <= WARM_STEPS:
        return f"{len(curves.run)} steps, more than {WARM_STEPS} needed"
    if not all(math.isfinite(loss) for curve in (curves.twin, *curves.perturbed) for loss in curve):
        return "the BF16 twin or its noise floor is not finite"
    if [row.step for row in steps] != list(range(len(curves.run))):
        return f"{len(steps)} step rows do not number the {len(curves.run)} steps of the curve"
    return ""


def _loss_problem(record: Record, plan: Any, gap: float, allowed: float, first: float, last: float) -> tuple[str, str]:
    """What is wrong and where; empty when nothing is."""
    curves: LossCurves = record.curves
    for step, loss in enumerate(curves.run):
        if not math.isfinite(loss):
            return "the loss is not finite", f"step {step}"
        if loss != record.steps[step].loss or float.fromhex(record.steps[step].loss_hex) != loss:
            return "the logged loss is not the curve's", f"step {step}"
    for step, (loss, again) in enumerate(zip(curves.run, record.loss_sums or (), strict=False)):
        if not abs(loss - again) <= SUM_ERROR_MAX * max(1.0, abs(again)):
            return f"the logged loss is {loss:.6g}, its sums give {again:.6g}", f"step {step}"
    if not gap <= allowed:
        late = range(WARM_STEPS, len(curves.run))
        widest = max(late, key=lambda step: abs(curves.run[step] - curves.twin[step]))
        return "too far from the BF16 twin", f"widest at step {widest}"
    if quantizes(plan) and curves.run == curves.twin:
        return "every loss is the BF16 twin's: nothing was quantized", "all steps"
    if not last < first:
        return "the loss does not fall", f"steps 0-{WARM_STEPS - 1} against the last {WARM_STEPS}"
    if record.entropy_floor is not None and not last >= record.entropy_floor:
        return f"below the entropy of the data ({record.entropy_floor:.4f} nats): labels leak", "last steps"
    return "", ""


def _late(left: Sequence[float], right: Sequence[float]) -> Iterator[tuple[float, float]]:
    return zip(left[WARM_STEPS:], right[WARM_STEPS:], strict=False)


def _gap(left: Sequence[float], right: Sequence[float]) -> float:
    return median([abs(a - b) for a, b in _late(left, right)])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def throughput(record: Record, plan: Any, limits: Any) -> Finding:
    """Clock, token count and warm-up are consistent with the steps. No limit on speed itself."""
    name, summary = "throughput", record.throughput
    if summary is None or summary.measured_steps < 1 or not record.steps:
        return unable(name, "measured nothing: no step after warm-up was timed")
    limit = "times and tokens consistent with the steps after warm-up"
    measured = (
        f"{summary.tokens_per_s:,.0f} tokens/s, step {summary.step_time_ms_p50:.1f} ms, "
        f"{summary.measured_steps} steps ({summary.label})"
    )
    for problem in (*_timing_problems(summary, record.steps, plan), *_watching_problems(record, summary)):
        return failed(name, measured, limit, detail=problem)
    return passed(name, measured, limit)


def _timing_problems(s: ThroughputSummary, steps: Sequence[StepRow], plan: Any) -> Iterator[str]:
    """Everything inconsistent, in words. Comparisons are written so that a NaN is a problem."""
    rows = steps[s.warmup_steps :]
    if s.label != LABELS.get(plan.numerics, plan.numerics):
        yield f"labelled {s.label!r}, the numbers are {plan.numerics}"
    for field in ("tokens", "tokens_per_s", "step_time_ms_p50", "step_time_ms_p95", "forward_ms_p50", "backward_ms_p50",
                  "step_time_sum_ms", "wall_ms"):  # fmt: skip
        if not 0 < getattr(s, field) < math.inf:
            yield f"{field} is {getattr(s, field)}"
    if s.warmup_steps < 1 or len(rows) != s.measured_steps:
        yield f"{s.measured_steps} of {len(steps)} steps measured with {s.warmup_steps} for warm-up"
    if s.tokens != sum(row.tokens for row in rows):
        yield f"{s.tokens} tokens counted, {sum(row.tokens for row in rows)} labels in the measured steps"
    for row in rows:
        if not row.forward_ms + row.backward_ms <= row.step_time_ms * (1 + 1e-9) + 1e-6:
            yield f"step {row.step}: forward and backward take longer than the step"
    times = [row.step_time_ms for row in rows]
    for what, value, expected in (
        ("step_time_sum_ms", s.step_time_sum_ms, sum(times)),
        ("step_time_ms_p50", s.step_time_ms_p50, percentile(times, 50)),
        ("step_time_ms_p95", s.step_time_ms_p95, percentile(times, 95)),
        ("forward_ms_p50", s.forward_ms_p50, percentile([row.forward_ms for row in rows], 50)),
        ("backward_ms_p50", s.backward_ms_p50, percentile([row.backward_ms for row in rows], 50)),
        ("tokens_per_s", s.tokens_per_s, s.tokens / s.step_time_sum_ms * 1e3 if s.step_time_sum_ms else math.nan),
    ):
        if not abs(value - expected) <= 1e-6 * expected:
            yield f"{what} is {value:.6g}, the steps give {expected:.6g}"
    if not s.step_time_sum_ms <= s.wall_ms * (1 + 1e-9):
        yield f"steps add up to {s.step_time_sum_ms:.3f} ms, the clock saw {s.wall_ms:.3f} ms"
    if not abs(s.step_time_sum_ms + s.excluded_ms - s.wall_ms) <= 0.01 * s.wall_ms + 1.0:
        yield f"steps {s.step_time_sum_ms:.3f} + excluded {s.excluded_ms:.3f} ms is not the clock's {s.wall_ms:.3f} ms"


def _watching_problems(record: Record, s: ThroughputSummary) -> Iterator[str]:
    """The comparisons made in measured steps have a clock of their own: no less may have been kept out of the steps."""
    steps = {row.step for row in record.steps[s.warmup_steps :]}
    least = sum(record.comparison_ms.get(step, 0.0) for step in steps)
    if not least <= s.excluded_ms * 1.01 + 1.0:
        yield f"gradient comparisons took {least:.3f} ms, {s.excluded_ms:.3f} ms were kept out of the steps"


def memory(record: Record, plan: Any, limits: Any) -> Finding:
    """Bytes held between forward and backward fall by what the recomputed regions discard."""
    name, rows = "memory", record.memory
    missing = sorted(set(plan.config.recompute) - {row.region for row in rows})
    if missing or not rows:
        return unable(name, "measured nothing for a recompute region", ", ".join(missing))
    held = {(row.held_off_bytes, row.held_on_bytes, row.predicted_on_bytes) for row in rows}
    if len(held) != 1:
        return unable(name, f"regions disagree on the bytes held: {sorted(held, key=str)}")
    for row in rows:
        problem = _region_problem(row)
        if problem:
            return failed(name, problem, "every region replayed, every saved output released", row.region)
    off, on, predicted = held.pop()
    fall, (low, high) = off - on, _fall_bounds(rows)
    measured = f"{_mib(off)} -> {_mib(on)} MiB held"
    regions = ", ".join(row.region for row in rows)
    if predicted is not None:
        limit = f"{_mib(predicted)} MiB, to the byte"
        good = on == predicted
    else:
        limit = f"fall of {_mib(low)} to {_mib(high)} MiB"
        good = low <= fall <= high
    if not good or (fall <= 0 and any(row.discards_outputs for row in rows)):
        return failed(
            name, f"{measured} (fall {fall:,} bytes)", limit, regions, "bytes held do not fall as they should"
        )
    return passed(name, measured, limit, regions)


def _region_problem(row: MemoryRow) -> str:
    if not 1 <= row.calls <= row.replays:
        return f"{row.replays} replays of {row.calls} calls"
    if not row.discards_outputs:
        return ""
    released, most = row.released_output_bytes, row.output_bytes + row.copy_bytes
    if released < row.output_bytes or (released > most and row.predicted_on_bytes is None):
        return f"{released:,} of {row.output_bytes:,} saved output bytes released"
    if row.inner_bytes + row.released_output_bytes <= 0:
        return "the region discards nothing"
    return ""


def _fall_bounds(rows: Sequence[MemoryRow]) -> tuple[int, int]:
    """Least and most by which the held bytes can fall: arguments may be held for the replay alone, or anyway."""
    most = sum(row.inner_bytes + row.output_bytes + row.copy_bytes for row in rows)
    least = sum(row.inner_bytes + row.released_output_bytes - row.argument_bytes for row in rows)
    return least, most


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"
