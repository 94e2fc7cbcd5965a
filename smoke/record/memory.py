"""Rows of the memory check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Bytes that autograd holds between forward and backward, counted by distinct storages."""

    region: str
    held_off_bytes: int
    """With no recompute at all."""
    held_on_bytes: int
    """With the regions of this run recomputed."""
    inner_bytes: int
    """Saved inside the region in the first pass and discarded."""
    output_bytes: int
    """Outputs of the region that its consumers asked to save."""
    released_output_bytes: int
    """Of those, the bytes that were recognised and discarded."""
    replays: int
    discards_outputs: bool
    calls: int = 1
    """How often the region ran in the forward; each call needs its replay."""
    argument_bytes: int = 0
    """Inputs of the region that are held for its replay."""
    copy_bytes: int = 0
    """Quantized copies that leaves keep only while their input is not recomputed."""
    predicted_on_bytes: int | None = None
    """What held_on_bytes has to be to the byte, computed from the run without recompute."""
