"""Faults that only a comparison with a recorded run can see; they are put into the rows that the check compares.

Each is red because of one way in which such a comparison can be wrong: turned around (then the steps that are equal are
named, and not this one), a missing step taken for an equal one, NaN taken for equal to NaN.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from smoke.baseline import compare
from smoke.faults.fault import Fault, replaced

STEP = 2
"""The step that is spoiled."""


@contextlib.contextmanager
def _recorded(change: Callable[[tuple[tuple[int, str], ...]], Any]) -> Iterator[None]:
    """The losses of the baseline go through ``change`` before they are compared."""
    original = compare.rows_of

    def spoiled(*args: Any) -> Any:
        rows = original(*args)
        return dataclasses.replace(rows, losses=tuple(change(rows.losses)))

    with replaced(compare, "rows_of", spoiled):
        yield


def one_loss_off() -> contextlib.AbstractContextManager[None]:
    """By one part in 2**40: far below anything that is printed."""
    return _recorded(
        lambda losses: [(s, (float.fromhex(x) * (1 + 2**-40)).hex() if s == STEP else x) for s, x in losses]
    )


def step_not_recorded() -> contextlib.AbstractContextManager[None]:
    return _recorded(lambda losses: losses[:STEP])


@contextlib.contextmanager
def nan_on_both_sides() -> Iterator[None]:
    nan = {"loss": float("nan"), "loss_hex": "nan"}
    spoiled = _recorded(lambda losses: [(s, "nan" if s == STEP else x) for s, x in losses])
    with spoiled, _steps(lambda rows: [dataclasses.replace(r, **nan) if r.step == STEP else r for r in rows]):
        yield


@contextlib.contextmanager
def _steps(change: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """The record's steps go through ``change`` when training is over."""
    original = compare.mark_of

    def spoiled(record: Any, *args: Any, **kwargs: Any) -> Any:
        record.steps[:] = change(record.steps)
        return original(record, *args, **kwargs)

    with replaced(compare, "mark_of", spoiled):
        yield


_COMPARED = {"precision": "bf16", "recompute": (), "baseline": "baseline.json"}
"""``smoke selftest`` puts the file into its own folder, and the run without a fault into the file."""


def _fault(name: str, summary: str, inject: Any, *may_follow: str) -> Fault:
    return Fault(
        name=name,
        row=19,
        summary=summary,
        red=("baseline",),
        may_follow=may_follow,
        where=f"step {STEP}",
        changes=_COMPARED,
        inject=inject,
    )


FAULTS = (
    _fault("baseline-one-loss-off", "one loss of the baseline is another one", one_loss_off),
    _fault("baseline-step-not-recorded", "the run has steps that the baseline has not", step_not_recorded),
    _fault("baseline-nan-on-both-sides", "NaN in the run and in its baseline", nan_on_both_sides, "finite"),
)
