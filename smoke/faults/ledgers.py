"""Faults of what a run keeps between steps: quantized weights that an update has made stale."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from smoke.faults.fault import Fault, replaced


@contextlib.contextmanager
def weight_cache_never_refreshed() -> Iterator[None]:
    from smoke.precision import emulated

    fresh = emulated._weights
    cache: dict[Any, Any] = {}

    def cached(w_OI: Sequence[Any], spec: Any, direction: Any, scales: Any) -> Any:
        key = (tuple(w.data_ptr() for w in w_OI), direction)
        if key not in cache:
            cache[key] = fresh(w_OI, spec, direction, scales)
        return cache[key]

    with replaced(emulated, "_weights", cached):
        yield


FAULTS = (
    Fault(
        name="weight-cache-never-refreshed",
        row=1,
        summary="quantized weights are cached and not made anew after an optimizer step",
        red=("weight_freshness",),
        may_follow=("gradient_parity", "loss_tracking"),
        where="step 1 ",
        changes={"precision": "mxfp8"},
        inject=weight_cache_never_refreshed,
    ),
)
