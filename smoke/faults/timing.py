"""Faults of the clock and of the token count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from smoke.faults.fault import Fault, replaced


def _throughput(**wrong: Any) -> AbstractContextManager[None]:
    """Every ``Throughput`` is made with these arguments."""
    from smoke.callbacks.throughput import Throughput

    original = Throughput.__init__

    def built(callback: Any, **kwargs: Any) -> None:
        original(callback, **{**kwargs, **wrong})

    return replaced(Throughput, "__init__", built)


@contextlib.contextmanager
def warmup_counted() -> Iterator[None]:
    with _throughput(warmup_steps=0):
        yield


@contextlib.contextmanager
def padding_counted() -> Iterator[None]:
    with _throughput(counts=lambda batch: (batch["labels"].numel(), batch["labels"].numel())):
        yield


@contextlib.contextmanager
def comparison_counted() -> Iterator[None]:
    """The clock goes on while the callbacks look at gradients."""
    from smoke.callbacks.throughput import Throughput

    def without_pause(callback: Any, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        callback._step = trainer.global_step

    with replaced(Throughput, "on_before_optimizer_step", without_pause):
        yield


_THD = {"precision": "bf16", "layout": "thd", "recompute": ()}
FAULTS = (
    Fault(
        name="warm-up-counted",
        row=20,
        summary="the first steps, which compile and allocate, count in the step time",
        red=("throughput",),
        where="warm-up",
        changes=_THD,
        inject=warmup_counted,
    ),
    Fault(
        name="padding-counted",
        row=20,
        summary="positions without a label count as tokens",
        red=("throughput",),
        where="tokens counted",
        changes=_THD,
        inject=padding_counted,
    ),
    Fault(
        name="comparison-counted",
        row=20,
        summary="work of the callbacks counts in the step time",
        red=("throughput",),
        where="gradient comparisons took",
        changes=_THD,
        inject=comparison_counted,
    ),
)
