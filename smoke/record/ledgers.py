"""Rows of the checks that keep books on a run: which weights were multiplied."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FreshnessRow:
    """Weight operands that one leaf multiplied in one step, against fresh quantizations of the live Parameters."""

    step: int
    module: str
    direction: str
    """row (of the output GEMM) or col (of grad_input)."""
    operands: int
    """Operands compared: experts and heads, and replays, count apart."""
    elements: int
    stale: int
    """Operands that differ in any bit."""
    parameter: str = ""
    """Of the first stale operand, as ``weight3``."""
    used_hex: str = ""
    fresh_hex: str = ""
