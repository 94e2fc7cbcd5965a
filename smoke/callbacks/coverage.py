"""Reads, at the end of training, which GEMMs really ran quantized.

The counting is done by the leaves; the callback only takes their rows at the right moment: when the last step is done,
or when training breaks off. ``GemmCounter`` is the count for leaves of your own: they say what they did when they did
it, since a module's type does not tell what it multiplied.

Counts are those of this process; a checkpoint carries them, and a resumed run adds its own to them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import lightning

from smoke.callbacks.common import rows_to_state
from smoke.record import CoverageRow

GEMMS = ("output", "grad_input", "grad_weight")
COUNTS = ("quantized_calls", "bf16_calls", "replay_quantized_calls", "replay_bf16_calls")


class GemmCounter:
    """Counts the GEMMs of a user's own leaves; ``Coverage(counter.rows)`` takes them."""

    def __init__(self) -> None:
        self._plans: dict[str, tuple[str | None, str]] = {}
        self._calls: Counter[tuple[str, str, str]] = Counter()

    def plan(self, module: str, format: str | None, reason: str = "") -> None:
        """Say what a leaf is meant to do: ``format`` of its operands (``e4m3 x e4m3``), None to stay unquantized."""
        self._plans[module] = (format, reason)

    def count(self, module: str, gemm: str, *, quantized: bool, replay: bool = False) -> None:
        """One product that ran: ``gemm`` is output, grad_input or grad_weight; ``replay`` while recomputing."""
        if gemm not in GEMMS:
            raise ValueError(f"gemm {gemm!r}: known are {', '.join(GEMMS)}")
        kind = "quantized_calls" if quantized else "bf16_calls"
        self._calls[module, gemm, f"replay_{kind}" if replay else kind] += 1

    def rows(self) -> list[CoverageRow]:
        """Three rows for each leaf that was planned or ran; one that ran without a plan was not meant to quantize."""
        modules = dict.fromkeys([*self._plans, *(module for module, _, _ in self._calls)])
        return [self._row(module, gemm) for module in modules for gemm in GEMMS]

    def _row(self, module: str, gemm: str) -> CoverageRow:
        format, reason = self._plans.get(module, (None, "no plan names it"))
        counts = {kind: self._calls[module, gemm, kind] for kind in COUNTS}
        planned = format is not None
        return CoverageRow(module=module, gemm=gemm, format=format or "bf16", planned=planned, reason=reason, **counts)


class Coverage(lightning.Callback):
    """Keeps what ``rows()`` returns at the end of training in ``self.rows``, added to the counts of a checkpoint.

    Args:
        rows: one row for each GEMM of each leaf, with its calls since the process began.
    """

    def __init__(self, rows: Callable[[], list[CoverageRow]]):
        self._read = rows
        self.rows: list[CoverageRow] = []
        self._earlier: dict[tuple[str, str], CoverageRow] = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.rows = self._total()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.rows = self._total()

    def _total(self) -> list[CoverageRow]:
        now = self._read()
        kept = {_key(row): row for row in now}
        gone = [row for key, row in self._earlier.items() if key not in kept]
        return [_sum(row, self._earlier.get(key)) for key, row in kept.items()] + gone

    def state_dict(self) -> dict[str, Any]:
        return {"rows": rows_to_state(self._total())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Counts of the checkpoint, less what this process has counted already (a second fit in one process)."""
        counted = _negative(self._read())
        loaded = {_key(row): row for row in (CoverageRow(**row) for row in state_dict["rows"])}
        self._earlier = counted | {key: _sum(row, counted.get(key)) for key, row in loaded.items()}


def _key(row: CoverageRow) -> tuple[str, str]:
    return row.module, row.gemm


def _sum(row: CoverageRow, other: CoverageRow | None) -> CoverageRow:
    if other is None:
        return row
    return dataclasses.replace(row, **{name: getattr(row, name) + getattr(other, name) for name in COUNTS})


def _negative(rows: Iterable[CoverageRow]) -> dict[tuple[str, str], CoverageRow]:
    return {_key(row): dataclasses.replace(row, **{name: -getattr(row, name) for name in COUNTS}) for row in rows}
