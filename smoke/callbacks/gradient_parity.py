"""Gradients of the watched run against those of a reference, per parameter and per slice.

At steps ``first``, ``first + every`` ... the run's expert choices are recorded during the forward pass. In
``on_before_optimizer_step`` (after accumulation, before clipping) the reference is asked for the gradients of the same
batches from the same weights, once with the recorded choices replayed, so that one flipped expert does not drown the
comparison, and once with routing free. The watched gradients are the ``.grad`` of the watched parameters themselves.

Slices matter: a gradient can be right on the whole tensor (cosine 0.999) and wrong on one head or on the rows that all
heads share. Errors are taken in float64 over the gradients as they are; two zero gradients (an expert without tokens)
agree, and a NaN stays a NaN.

The reference is a callable that must leave the watched module alone; ``smoke.callbacks.twin_reference`` makes one of a
second instance of the module. It draws from the random states that the watched forward began with, so that dropout
drops the same elements, and they are restored afterwards. Under DDP, whose gradients are means over the ranks, the
reference's are averaged likewise, and every rank keeps the same rows.

Limits: a strategy that shards gradients (FSDP, DeepSpeed) is refused, since no rank has a whole one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from smoke.callbacks.common import (
    random_states,
    random_states_from,
    refuse_manual_optimization,
    rows_to_state,
    trainable,
)
from smoke.numerics import cosine, relative_norm
from smoke.record import GradientRow

Slices = Mapping[str, Sequence[tuple[str, int, int]]]
Gradients = dict[str, Tensor]
Reference = Callable[[Any, Any], Mapping[str, Tensor | None]]


class Recorder(Protocol):
    """Records the expert choices of a forward pass; ``stop`` returns the tape that the reference replays."""

    def start(self) -> Any: ...

    def stop(self) -> Any: ...


def compare_gradients(
    watched: Mapping[str, Tensor | None],
    reference: Mapping[str, Tensor | None],
    *,
    step: int,
    routing: str,
    slices: Slices,
    quantized: Callable[[str], bool],
) -> Iterator[GradientRow]:
    """A row for each parameter, and for each of its slices (name, start, stop along the first dimension).

    An absent gradient counts as zero, on either side.
    """
    for name, left in watched.items():
        left, right = _filled(left, reference.get(name))
        if left.shape != right.shape:
            raise ValueError(f"{name}: gradient of shape {tuple(left.shape)}, reference of {tuple(right.shape)}")
        parts = [("", 0, left.shape[0] if left.dim() else 1), *slices.get(name, ())]
        for label, start, stop in parts:
            a, b = (left[start:stop], right[start:stop]) if label else (left, right)
            yield GradientRow(
                step=step,
                routing=routing,
                parameter=name,
                slice=label,
                quantized=quantized(name),
                relative_error=relative_norm(a, b),
                cosine=cosine(a, b),
                norm=_norm(a),
                reference_norm=_norm(b),
            )


def _filled(left: Tensor | None, right: Tensor | None) -> tuple[Tensor, Tensor]:
    if left is None:
        left = torch.zeros(1) if right is None else torch.zeros_like(right)
    return left, torch.zeros_like(left) if right is None else right


def _norm(a: Tensor) -> float:
    return float(torch.linalg.vector_norm(a.detach().double()))


def _due(step: int, first: int, every: int) -> bool:
    return step >= first and (step - first) % every == 0


def _mean_over_ranks(
    strategy: Any, watched: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """The reference's gradients, averaged as DDP averages the watched ones; an absent one counts as zero."""
    filled = {name: _filled(reference.get(name), gradient)[0] for name, gradient in watched.items()}
    return {name: strategy.reduce(gradient.clone(), reduce_op="mean") for name, gradient in filled.items()}


class _MicroBatch(NamedTuple):
    """What a forward was given: its batch, the routing tape that it left, the random states that it began with."""

    batch: Any
    tape: Any
    random: Any


class GradientParity(lightning.Callback):
    """Keeps the comparison's rows in ``self.rows``.

    Args:
        reference: ``reference(batch, tape)`` returns the gradients of one batch's undivided loss by parameter name, as
            tensors of their own; ``tape`` None leaves routing free. See ``twin_reference``.
        recorder: what records the tape; None for a model without routing (only ``replayed`` rows are made).
        slices: parts of parameters along their first dimension: {name: [(slice name, start, stop)]}.
        quantized: whether the leaf that owns a parameter is converted; by default none is.
        every: optimizer steps between two comparisons.
        first: step of the first comparison.
        free_every_time: compare with routing free at every comparison, else at the first alone.
        prefix: taken off the watched parameters' names.
    """

    def __init__(
        self,
        reference: Reference,
        recorder: Recorder | None = None,
        slices: Slices | None = None,
        quantized: Callable[[str], bool] = lambda name: False,
        *,
        every: int = 10,
        first: int = 0,
        free_every_time: bool = False,
        prefix: str = "",
    ):
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        if isinstance(reference, nn.Module) or not callable(reference):
            raise TypeError(
                f"reference has to be a function (batch, tape) -> gradients by name, got {type(reference).__name__}; "
                "twin_reference(module, twin, loss) makes one of a second instance of a module"
            )
        self.rows: list[GradientRow] = []
        self.times_ms: dict[int, float] = {}
        """By step, what the comparison took."""
        self.every, self.first = every, first
        self._reference, self._recorder, self._slices, self._quantized = reference, recorder, slices or {}, quantized
        self._free_every_time, self._prefix = free_every_time, prefix
        self._recording = False
        self._batch: Any = None
        self._random: Any = None
        self._micro_batches: list[_MicroBatch] = []

    @property
    def compared(self) -> tuple[str, ...]:
        """What there are rows of: parameter, slice (where there are slices) and free (routing, with a recorder)."""
        return "parameter", *(["slice"] if self._slices else []), *(["free"] if self._recorder is not None else [])

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        refuse_manual_optimization(self, pl_module)
        if trainer.world_size > 1 and not isinstance(trainer.strategy, DDPStrategy):
            strategy = type(trainer.strategy).__name__
            raise ValueError(f"GradientParity compares whole gradients: on several ranks it needs DDP, not {strategy}")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._recording = _due(trainer.global_step, self.first, self.every)
        if self._recording:
            self._batch, self._random = batch, random_states()
            if self._recorder is not None:
                self._recorder.start()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self._recording:
            tape = self._recorder.stop() if self._recorder is not None else None
            self._micro_batches.append(_MicroBatch(self._batch, tape, self._random))
            self._recording, self._batch, self._random = False, None, None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._recording:  # training_step returned None: there was no backward
            self._recording, self._batch = False, None
            if self._recorder is not None:
                self._recorder.stop()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self._micro_batches:
            return
        micro_batches, self._micro_batches = self._micro_batches, []
        watched = {name: p.grad for name, p in trainable(pl_module, self._prefix)}
        step, start = trainer.global_step, time.perf_counter()
        self._compare(trainer, watched, step, "replayed", micro_batches)
        if self._recorder is not None and (step == self.first or self._free_every_time):
            self._compare(trainer, watched, step, "free", [each._replace(tape=None) for each in micro_batches])
        self.times_ms[step] = (time.perf_counter() - start) * 1e3

    def _compare(
        self,
        trainer: Any,
        watched: Mapping[str, Tensor | None],
        step: int,
        routing: str,
        micro_batches: list[_MicroBatch],
    ) -> None:
        reference = self._mean_reference(micro_batches, trainer.accumulate_grad_batches)
        if reference and not reference.keys() & watched.keys():
            raise ValueError(
                f"the reference knows no parameter of the watched module: it names {next(iter(reference))}, the module "
                f"{next(iter(watched), 'none')}; see GradientParity(prefix=)"
            )
        if trainer.world_size > 1:
            reference = _mean_over_ranks(trainer.strategy, watched, reference)
        self.rows += compare_gradients(
            watched, reference, step=step, routing=routing, slices=self._slices, quantized=self._quantized
        )

    def _mean_reference(self, micro_batches: list[_MicroBatch], divisor: int) -> Mapping[str, Tensor | None]:
        """The reference's gradients as Lightning accumulates them: sum over micro-batches of gradient / divisor."""
        if divisor == 1:
            return self._of(micro_batches[0])
        total: dict[str, Tensor | None] = {}
        for micro_batch in micro_batches:
            for name, gradient in self._of(micro_batch).items():
                before = total.setdefault(name, None)
                if gradient is not None:
                    share = gradient.double() / divisor
                    total[name] = share if before is None else before + share
        return total

    def _of(self, micro_batch: _MicroBatch) -> Mapping[str, Tensor | None]:
        with random_states_from(micro_batch.random), torch.enable_grad():
            return self._reference(micro_batch.batch, micro_batch.tape)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": rows_to_state(self.rows), "times_ms": dict(self.times_ms)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [GradientRow(**row) for row in state_dict["rows"]]
        self.times_ms = dict(state_dict["times_ms"])
