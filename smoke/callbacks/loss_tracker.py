"""Loss, token counts, gradient norm and batch hash of every optimizer step.

Lightning divides the loss by ``accumulate_grad_batches`` before backward, and hands the divided value to
``on_train_batch_end``. Here it is multiplied back: the loss of a step is the mean of its micro-batches' own losses,
whatever the accumulation count. Without accumulation it is the loss to the last bit; with it, float32 division may cost
the last bit (a count that is a power of two costs none).

The gradient norm is taken in ``on_before_optimizer_step``: after accumulation, before clipping, summed in float64.
Aggregates over the run (mean loss over tokens, number of tokens) are torchmetrics on the module's device, reduced over
all ranks; the samples are those of this rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning
import torch
from torch import Tensor
from torchmetrics import SumMetric

from smoke.callbacks.common import label_counts, refuse_manual_optimization, rows_to_state, trainable


@dataclass(frozen=True, kw_only=True)
class LossSample:
    """One optimizer step. ``loss_hex`` is the float's exact hexadecimal form."""

    step: int
    loss: float
    loss_hex: str
    grad_norm: float
    tokens: int
    positions: int
    batch_sha256: str


@dataclass
class LossMeter:
    """Gathers the micro-batches of a step; plain numbers in, a ``LossSample`` out."""

    samples: list[LossSample] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list)
    _digests: list[str] = field(default_factory=list)
    _tokens: int = 0
    _positions: int = 0

    def micro_batch(self, loss: float, tokens: int, positions: int, digest: str) -> None:
        """One micro-batch with its own, undivided loss."""
        self._losses.append(loss)
        self._digests.append(digest)
        self._tokens += tokens
        self._positions += positions

    def finish(self, step: int, grad_norm: float) -> LossSample:
        """Close the step. Several micro-batches give the mean loss and the SHA-256 of their joined digests.

        A step whose every batch was skipped has no loss: NaN.
        """
        digests = self._digests
        loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
        sample = LossSample(
            step=step,
            loss=loss,
            loss_hex=loss.hex(),
            grad_norm=grad_norm,
            tokens=self._tokens,
            positions=self._positions,
            batch_sha256=digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
        )
        self.samples.append(sample)
        self._losses, self._digests, self._tokens, self._positions = [], [], 0, 0
        return sample

    def state(self) -> dict[str, Any]:
        """Samples and the open step, as plain values."""
        open_step = (list(self._losses), list(self._digests), self._tokens, self._positions)
        return {"samples": rows_to_state(self.samples), "open_step": open_step}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self.samples = [LossSample(**row) for row in state["samples"]]
        losses, digests, self._tokens, self._positions = state["open_step"]
        self._losses, self._digests = list(losses), list(digests)


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Square root of the sum of squares over all gradients, accumulated in float64: a 0-d float64 tensor."""
    squares = []
    for gradient in gradients:
        flat = gradient.detach().flatten().double()
        squares.append(torch.dot(flat, flat))
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


class LossTracker(lightning.Callback):
    """Keeps a ``LossSample`` for every optimizer step.

    Args:
        batch_sha256: hash of a batch, as hexadecimal text.
        counts: label tokens and positions of a batch; by default from its ``labels``, where -100 is ignored.
    """

    def __init__(
        self,
        batch_sha256: Callable[[Any], str] = lambda batch: "",
        counts: Callable[[Any], tuple[int, int]] = label_counts,
    ):
        self.meter = LossMeter()
        self._batch_sha256, self._counts = batch_sha256, counts
        # Two sums, not a MeanMetric: with nan_strategy="disable" torchmetrics 1.9 drops a MeanMetric's weights, and
        # with any other strategy a NaN loss would vanish from the mean.
        self._loss_sum = SumMetric(nan_strategy="disable").set_dtype(torch.float64)
        self._tokens = SumMetric(nan_strategy="disable").set_dtype(torch.float64)
        self._pending: tuple[int, float] | None = None

    @property
    def samples(self) -> list[LossSample]:
        """One for each optimizer step so far."""
        return self.meter.samples

    def mean_loss(self) -> float:
        """Mean over all label tokens of all ranks so far, each step weighing its tokens; NaN before the first step."""
        return float(self._loss_sum.compute() / self._tokens.compute()) if self.samples else float("nan")

    def tokens(self) -> int:
        """Label tokens of all ranks so far."""
        return int(self._tokens.compute()) if self.samples else 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        refuse_manual_optimization(self, pl_module)

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._loss_sum.to(pl_module.device)
        self._tokens.to(pl_module.device)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        norm = gradient_norm(p.grad for _, p in trainable(pl_module, "", [optimizer]) if p.grad is not None)
        self._pending = (trainer.global_step, float(norm))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:  # None where training_step returned None: Lightning skips the batch
            divided = float(loss.detach())
            tokens, positions = self._counts(batch)
            digest = self._batch_sha256(batch)
            self.meter.micro_batch(divided * trainer.accumulate_grad_batches, tokens, positions, digest)
        if self._pending is not None:
            self._aggregate(self.meter.finish(*self._pending))
            self._pending = None

    def _aggregate(self, sample: LossSample) -> None:
        self._loss_sum.update(sample.loss * sample.tokens)
        self._tokens.update(sample.tokens)

    def state_dict(self) -> dict[str, Any]:
        return self.meter.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.meter.load(state_dict)
        self._loss_sum.reset()
        self._tokens.reset()
        for sample in self.samples:
            self._aggregate(sample)
