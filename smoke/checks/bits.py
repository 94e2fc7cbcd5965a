"""recompute_parity and determinism: two trajectories from one snapshot, compared to the last bit. No tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smoke.checks.finding import Finding, failed, passed, unable
from smoke.record import BitRow, Record

QUANTITIES = ("loss", "gradient", "weight")
LEAST_STEPS = 3
"""A stale scale or a doubly counted amax needs two steps to show, and one more to be seen in the loss."""


def recompute_parity(record: Record, plan: Any, limits: Any) -> Finding:
    """Recompute on against off: loss, every gradient, every weight. ERROR where a plain rerun already differs."""
    name = "recompute_parity"
    noise = _of_kind(record, "rerun")
    differing = _first_difference(noise)
    if differing is not None:
        return unable(
            name,
            "the same trajectory run twice differs, so recompute cannot be judged; " + _bits_of(differing),
            _place(differing),
            _count(noise),
        )
    rows = _of_kind(record, "recompute")
    return _judge(name, rows, "recompute on and off") if not _gap(noise) else _judge_without_floor(rows, noise)


def _judge_without_floor(rows: Sequence[BitRow], noise: Sequence[BitRow]) -> Finding:
    """A difference is not excused by a missing noise floor, but equality proves nothing without it."""
    name = "recompute_parity"
    if _first_difference(rows) is not None:
        return _judge(name, rows, "recompute on and off")
    return unable(name, f"noise floor not measured: {_gap(noise)}", measured=_count(noise))


def determinism(record: Record, plan: Any, limits: Any) -> Finding:
    """The same trajectory run twice from one snapshot."""
    return _judge("determinism", _of_kind(record, "rerun"), "two runs of the same steps")


def _judge(name: str, rows: Sequence[BitRow], what: str) -> Finding:
    limit = f"every bit equal between {what}, {LEAST_STEPS} steps or more"
    differing = _first_difference(rows)
    if differing is not None:
        return failed(name, _count(rows), limit, _place(differing), _bits_of(differing))
    gap = _gap(rows)
    if gap:
        return unable(name, gap, measured=_count(rows))
    steps = len({row.step for row in rows})
    elements = sum(row.elements for row in rows)
    return passed(name, f"0 of {elements:,} values differ, {steps} steps", limit)


def _of_kind(record: Record, kind: str) -> list[BitRow]:
    return [row for row in record.bits if row.kind == kind]


def _gap(rows: Sequence[BitRow]) -> str:
    """What was not compared; empty when every quantity was, in every step."""
    if not rows:
        return "measured nothing"
    steps = {row.step for row in rows}
    if len(steps) < LEAST_STEPS:
        return f"{len(steps)} steps compared, {LEAST_STEPS} needed"
    for quantity in QUANTITIES:
        names = {row.name for row in rows if row.quantity == quantity}
        for step in sorted(steps):
            present = {row.name for row in rows if row.quantity == quantity and row.step == step}
            if not present:
                return f"no {quantity} compared at step {step}"
            if quantity == "weight" and present != names:
                return f"{quantity} of {sorted(names - present)[0]} not compared at step {step}"
    return "" if all(row.elements > 0 for row in rows) else "a comparison covered no element"


def _first_difference(rows: Sequence[BitRow]) -> BitRow | None:
    """The earliest: by step, then loss before gradient before weight."""
    differing = [row for row in rows if not row.equal]
    order = {quantity: index for index, quantity in enumerate(QUANTITIES)}
    return min(differing, key=lambda row: (row.step, order.get(row.quantity, len(order)))) if differing else None


def _place(row: BitRow) -> str:
    inside = f"[{row.slice}]" if row.slice else ""
    index = f" at {list(row.first_index)}" if row.first_index else ""
    return f"step {row.step} {row.quantity} {row.name}{inside}{index}".replace("  ", " ").strip()


def _bits_of(row: BitRow) -> str:
    return f"{row.left_hex or '?'} against {row.right_hex or '?'}, {row.mismatches} of {row.elements} values differ"


def _count(rows: Sequence[BitRow]) -> str:
    return f"{sum(not row.equal for row in rows)} of {len(rows)} tensors differ"
