"""Rows as JSON, and the one aggregate that rows need: plain values, a number that is not finite becomes null."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation between the two nearest values; NaN when there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def plain(value: Any) -> Any:
    """Turn a row, or any tree of rows, into JSON-ready values; a float that is not finite becomes None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_line(row: Any) -> str:
    """One JSON object on one line, for ``steps.jsonl``."""
    return json.dumps(plain(row), ensure_ascii=False, allow_nan=False)
