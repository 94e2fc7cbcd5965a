"""Faults of batches: labels, positions and sequence edges."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from smoke.faults.fault import Fault, replaced
from smoke.faults.numbers import last_step


@contextlib.contextmanager
def every_label_ignored() -> Iterator[None]:
    import torch

    from smoke.data.module import SmokeData

    def without_labels(data: Any, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "labels": torch.full_like(batch["labels"], -100)} if last_step(data.trainer) else batch

    with replaced(SmokeData, "on_after_batch_transfer", without_labels):
        yield


FAULTS = (
    Fault(
        name="every-label-ignored",
        row=16,
        summary="a batch whose every label is ignored: its loss is 0/0",
        red=("finite",),
        may_follow=("loss_tracking", "gradient_presence"),
        where="step 3",
        changes={"precision": "mxfp8"},
        inject=every_label_ignored,
    ),
)
