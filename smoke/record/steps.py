"""Rows of the checks on how steps are made and continued: accumulation, and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ResumeRow:
    """One part of the checkpoint of a resumed run against the same step's of the run that never stopped."""

    resumes: int
    """How often the run was resumed before: 1 or 2."""
    step: int
    """The step that was done last."""
    part: str
    """As ``state_dict``, ``optimizer_states``, ``loops`` or ``callback LossTracker``."""
    compared: int
    """Tensors and plain values; times are left out."""
    differing: int
    first: str = ""
    """Path of the first that differs."""
    whole: str = ""
    resumed: str = ""


@dataclass(frozen=True, kw_only=True)
class AccumulationRow:
    """Loss or one gradient of accumulated micro-batches against those of one batch that holds them all, in float64."""

    name: str
    """Parameter name; empty for the loss."""
    micro_batches: int
    relative_error: float
    elements: int
