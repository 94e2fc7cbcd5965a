"""Step, forward and backward times, and label tokens a second.

What must not count: work of other callbacks (a gradient comparison costs as much as a step), validation, data loading,
and the first steps, which compile and allocate. Lightning runs callbacks in order, so two of them bracket all others:
the first stops the clock when a hook begins, the last starts it again. Whatever runs between them is excluded, with no
help from the callback that does it. ``Throughput.around(callbacks)`` builds the list.

    forward    on_train_batch_start .. on_before_zero_grad (or on_before_backward)
    backward   on_before_backward   .. on_after_backward, replays of recomputed regions included
    step       both, zeroing of gradients and the optimizer, until on_train_batch_end

The clock and the device synchronization are handed in, so that tests replace them. Limits: callbacks that Lightning
itself appends (progress bar, checkpoint) are outside the bracket; of their work only ``on_train_batch_start`` counts.
After a resume the first steps are not taken for warm-up again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning
import torch

from smoke.callbacks.common import label_counts, rows_to_state
from smoke.record import ThroughputSummary, percentile


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """Times of one optimizer step, all its micro-batches together."""

    step: int
    tokens: int
    step_time_ms: float
    forward_ms: float
    backward_ms: float


def _nothing() -> None:
    """No device to wait for."""


class ThroughputMeter:
    """A stopwatch with phases. ``clock`` returns seconds; ``synchronize`` waits for the device before each reading."""

    def __init__(
        self,
        *,
        warmup_steps: int = 2,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] = _nothing,
    ):
        self.warmup_steps, self.clock, self.synchronize = warmup_steps, clock, synchronize
        self.steps: list[TimedStep] = []
        self._settled = (0.0, 0.0)  # wall and excluded milliseconds up to the end of the last measured step
        self._restart()

    def _restart(self) -> None:
        """No open step and no clock reading of this process yet."""
        self._phases: dict[str, float] = {}
        self._tokens = 0
        self._phase, self._since = "", 0.0
        self._paused_at: float | None = None
        self._wall_start: float | None = None
        self._base = self._settled
        self._excluded = 0.0

    def resume(self, phase: str) -> None:
        """Run the clock for ``phase``."""
        self.pause()
        now = self._now()
        if self._wall_start is not None and self._paused_at is not None:
            self._excluded += now - self._paused_at
        elif len(self.steps) >= self.warmup_steps:
            self._wall_start = now
        self._phase, self._since, self._paused_at = phase, now, None

    def pause(self) -> None:
        """Stop the clock; what happens until the next ``resume`` belongs to no step."""
        if not self._phase:
            return
        now = self._now()
        self._phases[self._phase] = self._phases.get(self._phase, 0.0) + now - self._since
        self._phase, self._paused_at = "", now

    def count(self, tokens: int) -> None:
        """Label tokens of a micro-batch of the open step."""
        self._tokens += tokens

    def finish(self, step: int) -> TimedStep:
        """Close the step (the clock is stopped)."""
        self.pause()
        timed = TimedStep(
            step=step,
            tokens=self._tokens,
            step_time_ms=sum(self._phases.values()) * 1e3,
            forward_ms=self._phases.get("forward", 0.0) * 1e3,
            backward_ms=self._phases.get("backward", 0.0) * 1e3,
        )
        self.steps.append(timed)
        self._phases, self._tokens = {}, 0
        if self._wall_start is not None and self._paused_at is not None:
            wall = (self._paused_at - self._wall_start) * 1e3
            self._settled = (self._base[0] + wall, self._base[1] + self._excluded * 1e3)
        return timed

    def summary(self, label: str) -> ThroughputSummary | None:
        """Aggregates of the steps after warm-up; None when there are none."""
        measured = self.steps[self.warmup_steps :]
        if not measured:
            return None
        times = [s.step_time_ms for s in measured]
        tokens, total = sum(s.tokens for s in measured), sum(times)
        return ThroughputSummary(
            warmup_steps=self.warmup_steps,
            measured_steps=len(measured),
            tokens=tokens,
            tokens_per_s=tokens / total * 1e3 if total > 0 else float("nan"),
            step_time_ms_p50=percentile(times, 50),
            step_time_ms_p95=percentile(times, 95),
            forward_ms_p50=percentile([s.forward_ms for s in measured], 50),
            backward_ms_p50=percentile([s.backward_ms for s in measured], 50),
            step_time_sum_ms=total,
            wall_ms=self._settled[0],
            excluded_ms=self._settled[1],
            label=label,
        )

    def state(self) -> dict[str, Any]:
        """Finished steps as plain values; an open step is not kept."""
        return {"steps": rows_to_state(self.steps), "settled": list(self._settled)}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self.steps = [TimedStep(**row) for row in state["steps"]]
        self._settled = (state["settled"][0], state["settled"][1])
        self._restart()

    def _now(self) -> float:
        self.synchronize()
        return self.clock()


class Throughput(lightning.Callback):
    """The opening side of the bracket; ``closing`` is the other one.

    Args:
        label: what the times are times of, printed beside them: emulation, native, bf16, or a word of your own.
        warmup_steps: optimizer steps at the start that are timed but not aggregated.
        clock: seconds, monotonic.
        synchronize: waits for the device; by default ``torch.cuda.synchronize`` where the module is on CUDA.
        counts: label tokens and positions of a batch.
    """

    def __init__(
        self,
        *,
        label: str = "this run",
        warmup_steps: int = 2,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
        counts: Callable[[Any], tuple[int, int]] = label_counts,
    ):
        self.meter = ThroughputMeter(warmup_steps=warmup_steps, clock=clock, synchronize=synchronize or _nothing)
        self.closing = ThroughputClosing(self.meter)
        self.label, self._counts = label, counts
        self._choose_synchronize = synchronize is None
        self._step: int | None = None

    def around(self, callbacks: Sequence[lightning.Callback]) -> list[lightning.Callback]:
        """The callbacks inside the bracket, in order, for ``Trainer(callbacks=...)``."""
        return [self, *callbacks, self.closing]

    def summary(self) -> ThroughputSummary | None:
        """Aggregates of this rank's steps after warm-up; None when there are none."""
        return self.meter.summary(self.label)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        order = trainer.callbacks
        if self.closing not in order or order.index(self.closing) < order.index(self):
            raise ValueError("Throughput is half a bracket: pass Trainer(callbacks=throughput.around([...]))")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._choose_synchronize and pl_module.device.type == "cuda":
            self.meter.synchronize = torch.cuda.synchronize

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.meter.pause()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.meter.pause()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.meter.pause()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.meter.pause()
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.meter.pause()
        self.meter.count(self._counts(batch)[0])
        if self._step is not None:
            self.meter.finish(self._step)
            self._step = None

    def state_dict(self) -> dict[str, Any]:
        return self.meter.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.meter.load(state_dict)


class ThroughputClosing(lightning.Callback):
    """The other side: starts the clock again when all callbacks have run."""

    def __init__(self, meter: ThroughputMeter):
        self._meter = meter

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._meter.resume("forward")

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._meter.resume("other")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._meter.resume("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._meter.resume("other")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._meter.resume("other")
