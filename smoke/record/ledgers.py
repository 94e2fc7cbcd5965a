"""Rows of the checks that keep books: which weights are multiplied, types of modules, what callbacks changed."""

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


@dataclass(frozen=True, kw_only=True)
class DtypeRow:
    """Floating-point tensors of one kind and one type that one module had."""

    module: str
    kind: str
    """parameter, buffer, input, activation, loss, gradient, master or moment."""
    dtype: str
    """As ``bfloat16``."""
    step: int
    """Step in which the first was seen."""
    tensors: int


@dataclass(frozen=True, kw_only=True)
class NeutralRow:
    """Something that was no longer the same when the callbacks of one hook had run."""

    step: int
    hook: str
    """As ``on_after_backward``."""
    name: str
    """As ``random state of torch`` or ``buffer layers.1.mlp.router.expert_load``."""
