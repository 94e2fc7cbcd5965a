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


def _rows(**spoil: Any) -> Any:
    """``row_batch`` with some of its arrays spoiled: name = function of the batch."""
    from smoke.data import packing

    original = packing.row_batch

    def spoiled(*args: Any) -> Any:
        batch = original(*args)
        return {**batch, **{name: function(batch) for name, function in spoil.items()}}

    return replaced(packing, "row_batch", spoiled)


@contextlib.contextmanager
def positions_off_by_one() -> Iterator[None]:
    """Rotary attention sees differences of positions only, so nothing but the positions themselves tells."""
    with _rows(positions=lambda batch: batch["positions"] + 1):
        yield


@contextlib.contextmanager
def labels_not_shifted() -> Iterator[None]:
    with _rows(labels=lambda batch: batch["tokens"].copy()):
        yield


@contextlib.contextmanager
def _sequences(change: Any) -> Iterator[None]:
    """The model reads packs of several sequences through ``change(batch, sequences)``."""
    from smoke.model.attention import Sequences

    original = Sequences.of

    def changed(batch: Any, layout: str) -> Any:
        found = original(batch, layout)
        return change(batch, found) if layout == "thd" and len(found.lengths) > 1 else found

    with replaced(Sequences, "of", staticmethod(changed)):
        yield


@contextlib.contextmanager
def positions_restart_late() -> Iterator[None]:
    import torch

    from smoke.model.attention import Sequences

    def late(batch: Any, found: Sequences) -> Sequences:
        return Sequences(found.lengths, torch.cat([found.positions_T[:1], found.positions_T[:-1]]))

    with _sequences(late):
        yield


@contextlib.contextmanager
def attention_crosses_edges() -> Iterator[None]:
    from smoke.model.attention import Sequences

    def one_sequence(batch: Any, found: Sequences) -> Sequences:
        return Sequences((found.tokens,), found.positions_T)

    with _sequences(one_sequence):
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
    Fault(
        name="positions-off-by-one",
        row=0,
        summary="positions begin at one",
        red=("preflight",),
        where="batch 0",
        changes={"precision": "mxfp8"},
        inject=positions_off_by_one,
    ),
    Fault(
        name="labels-not-shifted",
        row=0,
        summary="each token is its own label",
        red=("preflight",),
        where="batch 0",
        changes={"precision": "mxfp8"},
        inject=labels_not_shifted,
    ),
    Fault(
        name="positions-restart-late",
        row=8,
        summary="positions of a pack restart one token behind the edge",
        red=("packed_parity",),
        may_follow=("accumulation_parity",),
        where="self_attention",
        changes={"precision": "bf16", "layout": "thd", "recompute": ()},
        inject=positions_restart_late,
    ),
    Fault(
        name="attention-crosses-edges",
        row=8,
        summary="attention takes the whole pack for one sequence, positions restarted or not",
        red=("packed_parity",),
        may_follow=("accumulation_parity",),
        where="a sequence sees another one",
        changes={"precision": "bf16", "layout": "thd", "recompute": ()},
        inject=attention_crosses_edges,
    ),
)
