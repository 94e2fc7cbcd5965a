"""One row for each run of ``smoke matrix``: what differs between combinations, beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from smoke.checks import ERROR, FAIL
from smoke.checks.finding import median
from smoke.checks.training import WARM_STEPS
from smoke.record import LossCurves, Record
from smoke.report.contract import Report
from smoke.report.text import number


@dataclass(frozen=True, kw_only=True)
class MatrixRow:
    """One combination. None where nothing was measured."""

    precision: str
    recompute: str
    numerics: str
    verdict: str
    exit_code: int
    loss_last: float | None
    """Nats per token."""
    loss_gap: float | None
    """Median distance to the BF16 twin's loss, as in loss_tracking."""
    gradient_error: float | None
    """Largest relative error of any parameter or slice, routing replayed."""
    held_mib: float | None
    step_ms: float | None
    """Median, of what ``times_of`` says."""
    times_of: str
    red: tuple[str, ...]
    """Checks that failed or could not judge."""


def matrix_row(report: Report, record: Record) -> MatrixRow:
    """The row of one run."""
    errors = [row.relative_error for row in record.gradients if row.routing == "replayed"]
    return MatrixRow(
        precision=report.config["precision"],
        recompute="+".join(report.config["recompute"]) or "none",
        numerics=report.numerics or "-",
        verdict=report.verdict,
        exit_code=report.exit_code,
        loss_last=report.summary.loss_last,
        loss_gap=_gap(record.curves),
        gradient_error=(math.nan if any(map(math.isnan, errors)) else max(errors)) if errors else None,
        held_mib=report.summary.held_mib,
        step_ms=report.summary.step_time_ms_p50,
        times_of=report.times_of,
        red=tuple(report.with_status(FAIL, ERROR)),
    )


def _gap(curves: LossCurves) -> float | None:
    late = [abs(a - b) for a, b in zip(curves.run[WARM_STEPS:], curves.twin[WARM_STEPS:], strict=False)]
    return median(late) if late else None


def columns(rows: Sequence[MatrixRow]) -> list[tuple[str, list[str]]]:
    """Title and cells of each column. The title of the times says what they are times of."""
    of = sorted({row.times_of for row in rows if row.times_of})
    return [
        ("precision", [row.precision for row in rows]),
        ("recompute", [row.recompute for row in rows]),
        ("numerics", [row.numerics for row in rows]),
        ("verdict", [row.verdict for row in rows]),
        ("final loss", [number(row.loss_last, 4) for row in rows]),
        ("loss gap", [_digits(row.loss_gap) for row in rows]),
        ("worst grad error", [_digits(row.gradient_error) for row in rows]),
        ("held MiB", [number(row.held_mib, 2) for row in rows]),
        (f"step ms ({', '.join(of) or 'none'})", [number(row.step_ms, 0) for row in rows]),
        ("red checks", [", ".join(row.red) or "-" for row in rows]),
    ]


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
