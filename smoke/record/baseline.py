"""Rows of the check ``baseline``: what marks a run for later ones, and what an earlier one left for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunMark:
    """What a baseline keeps of a run besides its losses."""

    key: Mapping[str, str]
    """Toolchain, device, configuration and data: losses are bit-equal only where all of it is."""
    costs: Mapping[str, float | None]
    """tokens_per_s, peak_gib and held_mib; None where not measured, or not comparable."""


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """One cost of this run beside those of the recorded runs."""

    quantity: str
    """tokens_per_s, peak_gib or held_mib."""
    value: float | None
    recorded: tuple[float, ...]
    """Of every recorded run, oldest first."""


@dataclass(frozen=True, kw_only=True)
class BaselineRows:
    """The recorded side of the comparison; the other one is ``Record.steps``."""

    outside: str = ""
    """Why nothing recorded applies to this run; empty where an entry has its key."""
    losses: tuple[tuple[int, str], ...] = ()
    """Step and exact hexadecimal loss of the entry."""
    costs: tuple[CostRow, ...] = ()
