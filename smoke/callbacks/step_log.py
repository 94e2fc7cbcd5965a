"""One ``StepRow`` for each optimizer step, handed on at once, so that a run that dies leaves its steps behind.

A resumed run has a new sink, and the rows of the steps before go to it too: the two callbacks behind this one bring
them back. So this one has no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning

from smoke.callbacks.loss_tracker import LossSample, LossTracker
from smoke.callbacks.throughput import Throughput, TimedStep
from smoke.record import StepRow


def merge(sample: LossSample, timed: TimedStep | None) -> StepRow:
    """Loss and times of a step as one row, NaN where it was not timed; ValueError when they are of two steps."""
    if timed is None:
        timed = TimedStep(step=sample.step, tokens=0, step_time_ms=math.nan, forward_ms=math.nan, backward_ms=math.nan)
    if sample.step != timed.step:
        raise ValueError(f"loss is of step {sample.step}, times are of step {timed.step}")
    return StepRow(
        step=sample.step,
        loss=sample.loss,
        loss_hex=sample.loss_hex,
        grad_norm=sample.grad_norm,
        tokens=sample.tokens,
        padded_tokens=sample.positions,
        step_time_ms=timed.step_time_ms,
        forward_ms=timed.forward_ms,
        backward_ms=timed.backward_ms,
        batch_sha256=sample.batch_sha256,
    )


class StepLog(lightning.Callback):
    """Merges the newest loss and times of two other callbacks, which stand before it in the Trainer's list.

    Args:
        loss: the tracker that has the step's loss when this callback's ``on_train_batch_end`` runs.
        throughput: the bracket around both.
        sink: takes each row, on global rank zero only (a list's ``append``, a writer of ``steps.jsonl``).
    """

    def __init__(self, loss: LossTracker, throughput: Throughput, sink: Callable[[StepRow], None]):
        self._loss, self._throughput, self._sink = loss, throughput, sink
        self._written = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        samples, timed = self._loss.samples, self._throughput.meter.steps
        for sample, times in zip(samples[self._written :], timed[self._written :], strict=True):
            if trainer.is_global_zero:
                self._sink(merge(sample, times))
        self._written = len(samples)
