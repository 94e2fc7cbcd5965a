"""Which parameters got a gradient that is not zero, and in how many steps.

A parameter that a recomputed region lost keeps its initial value while the loss still falls: only a count per parameter
shows it. Zero is legitimate for an expert that got no token in a step; the caller says which those are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import lightning
import torch

from smoke.callbacks.common import trainable
from smoke.record import PresenceRow


@dataclass
class PresenceCount:
    """Steps in which a gradient was expected, present, and not zero."""

    expected: int = 0
    present: int = 0
    nonzero: int = 0


class PresenceMeter:
    """Counts per parameter; a step is a mapping from name to None (absent), False (all zero) or True."""

    def __init__(self) -> None:
        self.counts: dict[str, PresenceCount] = {}

    def step(self, nonzero: dict[str, bool | None], idle: Collection[str]) -> None:
        """Count one step; parameters in ``idle`` are not expected to have a gradient in it."""
        for name, value in nonzero.items():
            count = self.counts.setdefault(name, PresenceCount())
            if name not in idle:
                count.expected += 1
                count.present += value is not None
                count.nonzero += bool(value)

    def rows(self) -> list[PresenceRow]:
        """One row for each parameter seen."""
        return [
            PresenceRow(
                parameter=name,
                present_steps=count.present,
                nonzero_steps=count.nonzero,
                steps=count.expected,
                may_be_zero=count.expected == 0,
            )
            for name, count in self.counts.items()
        ]


class GradientPresence(lightning.Callback):
    """Looks at every trainable parameter's ``.grad`` in ``on_before_optimizer_step``.

    Args:
        idle: names of the parameters for which a zero gradient is legitimate in the step that just ran.
        prefix: taken off the parameter names.
    """

    def __init__(self, idle: Callable[[], Collection[str]] = tuple, *, prefix: str = ""):
        self.meter = PresenceMeter()
        self._idle, self._prefix = idle, prefix

    def rows(self) -> list[PresenceRow]:
        """One row for each trainable parameter."""
        return self.meter.rows()

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        parameters = trainable(pl_module, self._prefix, [optimizer])
        result: dict[str, bool | None] = {name: None for name, _ in parameters}
        grads = {name: p.grad.detach() for name, p in parameters if p.grad is not None and p.grad.numel()}
        if grads:
            flags = torch.stack([grad.any() for grad in grads.values()]).tolist()
            result.update(zip(grads, flags, strict=True))
        self.meter.step(result, frozenset(self._idle()))

    def state_dict(self) -> dict[str, Any]:
        return {name: asdict(count) for name, count in self.meter.counts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.meter.counts = {name: PresenceCount(**count) for name, count in state_dict.items()}
