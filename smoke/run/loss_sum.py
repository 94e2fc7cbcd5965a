"""The sums that a step's loss is made of, taken from the logits: what loss_tracking holds the logged loss against.

Shape letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smoke.model.deepseek import DeepseekV3, ModelOutput
from smoke.module import IGNORED_LABEL, Batch, SmokeModule

ROWS_OF_A_CHUNK = 1024


def attach_sums(module: SmokeModule, note: Callable[[Tensor], None]) -> Any:
    """Note, in every forward, cross entropies and labels of both heads, auxiliary loss and one batch: float64 [6]."""

    def see(model: DeepseekV3, args: tuple[Batch, ...], out: ModelOutput) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        batch = args[0]
        sequences = len(batch["cu_seqlens"]) - 1 if "cu_seqlens" in batch else len(batch["tokens"])
        main = _sum(out.logits_TV, out.labels_T)
        both = [*main, *_sum(out.mtp_logits_TV, out.mtp_labels_T)]
        aux_loss = out.aux_loss.detach().double()
        note(torch.stack([*both, aux_loss * sequences, torch.full_like(aux_loss, sequences)]))

    return module.model.register_forward_hook(see)


def combine_sums(mtp_loss_weight: float) -> Callable[[Tensor], float]:
    """The loss of a step from the six sums of all its micro-batches."""

    def combine(sums: Tensor) -> float:
        main, labels, mtp, mtp_labels, aux, sequences = sums
        loss = main / labels + aux / sequences
        return float(loss + mtp_loss_weight * mtp / mtp_labels if mtp_labels > 0 else loss)

    return combine


@torch.no_grad()
def _sum(logits_TV: Tensor | None, labels_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum of cross entropies, and how many labels count, in float64; a few rows at a time."""
    zero = torch.zeros((), dtype=torch.float64, device=None if logits_TV is None else logits_TV.device)
    if logits_TV is None or labels_T is None:
        return zero, zero
    total = zero
    for logits, labels in zip(logits_TV.split(ROWS_OF_A_CHUNK), labels_T.split(ROWS_OF_A_CHUNK), strict=True):
        total = total + F.cross_entropy(logits.double(), labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return total, (labels_T != IGNORED_LABEL).sum().double()
