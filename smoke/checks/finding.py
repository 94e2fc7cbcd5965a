"""What a check says, and the comparisons that a NaN cannot pass.

A check is a pure function of the record, the plan and the recipe's limits. It returns one ``Finding``: PASS, FAIL, or
ERROR where it could not judge (nothing was measured, a planned step is missing, the noise floor is not zero).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from smoke.record import Record

PASS, FAIL, SKIP, ERROR = "PASS", "FAIL", "SKIP", "ERROR"
Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check's result. ``where`` names the module, parameter, slice and step of the worst or first offender."""

    name: str
    status: str
    measured: str = ""
    limit: str = ""
    where: str = ""
    detail: str = ""

    def __str__(self) -> str:
        """One line: status, name, and what there is of measured value, limit, place and detail."""
        words = [self.measured, f"limit: {self.limit}" if self.limit else "", self.where, self.detail]
        return f"{self.status} {self.name}: {'; '.join(word for word in words if word)}"


class Limits(Protocol):
    """Limits of a recipe (``plan.recipe.limits``); None where a recipe has none."""

    gradient_error_max: float | None
    gradient_error_slice_max: float | None
    gradient_error_median_max: float | None
    gradient_error_free_max: float | None
    gradient_error_min: float | None
    loss_gap_max: float | None


Check = Callable[[Record, Any, Any], Finding]


def passed(name: str, measured: str, limit: str, where: str = "", detail: str = "") -> Finding:
    return Finding(name=name, status=PASS, measured=measured, limit=limit, where=where, detail=detail)


def failed(name: str, measured: str, limit: str, where: str = "", detail: str = "") -> Finding:
    return Finding(name=name, status=FAIL, measured=measured, limit=limit, where=where, detail=detail)


def unable(name: str, detail: str, where: str = "", measured: str = "") -> Finding:
    """The check could not judge."""
    return Finding(name=name, status=ERROR, measured=measured, where=where, detail=detail)


def quantizes(plan: Any) -> bool:
    """Whether the recipe of the plan quantizes anything."""
    return plan.recipe.name != "bf16"


def worst(rows: Iterable[Row], value: Callable[[Row], float]) -> Row:
    """The row with the largest value; a NaN is larger than any number."""
    return max(rows, key=lambda row: math.inf if math.isnan(value(row)) else value(row))


def median(values: Sequence[float]) -> float:
    """Middle value, or the mean of the two middle ones; NaN when any value is NaN or there are none."""
    if not values or any(math.isnan(value) for value in values):
        return math.nan
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"
