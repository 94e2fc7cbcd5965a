"""Faults of single numbers: NaN where nobody looks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from smoke.faults.fault import Fault, replaced


def last_step(trainer: Any) -> bool:
    """Whether the watched training is in its last step (so that no later step inherits the damage)."""
    return trainer.global_step == trainer.max_steps - 1


@contextlib.contextmanager
def nan_in_one_gradient() -> Iterator[None]:
    from smoke.module import SmokeModule

    def poison(module: Any) -> None:
        if last_step(module.trainer):
            module.model.layers[1].self_attention.linear_proj.weight.grad[3, 5] = float("nan")

    with replaced(SmokeModule, "on_after_backward", poison):
        yield


FAULTS = (
    Fault(
        name="nan-in-one-gradient",
        row=15,
        summary="one weight gradient holds a NaN while the loss stays finite",
        red=("finite",),
        where="layers.1.self_attention.linear_proj.weight",
        changes={"precision": "mxfp8"},
        inject=nan_in_one_gradient,
    ),
)
