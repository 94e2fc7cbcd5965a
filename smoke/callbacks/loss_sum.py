"""The loss of each optimizer step a second time, from sums over its micro-batches.

What a Trainer hands around is divided by the accumulation count, and a curve that forgets it is off by a factor. So the
sums that a loss is made of are taken where they arise, added over the micro-batches of a step, and divided once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch import Tensor


class LossSum(lightning.Callback):
    """Keeps one loss for each optimizer step in ``self.losses``.

    Args:
        attach: ``attach(module, note)`` calls ``note(sums)``, a float64 vector, in every forward; returns what has a
            ``remove``.
        combine: the loss of a step from the sum of its micro-batches' vectors.
    """

    def __init__(self, attach: Callable[[Any, Callable[[Tensor], None]], Any], combine: Callable[[Tensor], float]):
        self.losses: list[float] = []
        self._attach, self._combine = attach, combine
        self._handle: Any = None
        self._last: Tensor | None = None
        self._open: list[Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._handle = self._attach(pl_module, self._note)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self._last is not None:
            self._open.append(self._last)
            self._last = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._open:
            self.losses.append(self._combine(torch.stack(self._open).sum(0)))
            self._open = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._remove()

    def _note(self, sums: Tensor) -> None:
        self._last = sums

    def _remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = list(state_dict["losses"])
