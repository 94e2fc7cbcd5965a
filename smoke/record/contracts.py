"""Rows of the contract checks: rope_contract, saved_tensors, attention_backend."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeRow:
    """rope_contract: one property of the rotary embedding, measured on one case."""

    kind: str
    """table, scale, forward or gradient: ``value`` is the largest error against a float64 oracle, relative to the
    largest number of its position, in rounding units (the machine epsilon of the type). unwritten, outside, input,
    repeat or positions: ``value`` counts elements that a kernel did not write, wrote outside of its output, changed in
    its input, gave differently in a second call, or placed at a wrong position."""
    case: str
    """Who computed it (reference, triton, a function of the model), sizes and type."""
    tensor: str
    position: int | None
    """Where the error is largest, in tokens from the start of the sequence; None for counts and scales."""
    value: float


@dataclass(frozen=True, kw_only=True)
class SavedRow:
    """A tensor that was saved for backward and written in place before backward asked for it."""

    step: int | None
    """None: in the trajectories before training."""
    place: str
    """The module that saved it, and its recompute region."""
    shape: tuple[int, ...]
    dtype: str
    saved_version: int
    """Autograd's count of writes in place when the tensor was saved."""
    version: int
    """The same when backward asked for it."""


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """Which kernel ran the core attention of one module in training, and how often."""

    module: str
    backend: str
    """flash, efficient, cudnn, overrideable or math (the unfused path); empty where none ran."""
    dtype: str
    columns: int
    """Width of query, key and value."""
    calls: int
    """Replays included."""
