"""Positions and labels of the live batches are held against the tokens; a wrong one is red in preflight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_runs import finding, red, small_session

import smoke.data.packing as packing
from smoke.run.forms import packed_twins
from smoke.run.measure import misplaced, preflight_rows


def tensors(batch):
    return {name: torch.from_numpy(array) for name, array in batch.items()}


PACK = [np.array([5, 6, 7, 256], np.uint16), np.array([8, 256], np.uint16), np.array([9], np.uint16)]


def test_sound_batches_have_nothing_out_of_place():
    assert misplaced(tensors(packing.pack_batch(PACK))) == (0, 0)
    rows = [np.array([1, 2, 3, 4], np.uint16), np.array([5, 6, 7, 8], np.uint16)]
    assert misplaced(tensors(packing.row_batch(rows))) == (0, 0)


@pytest.mark.parametrize(
    ("name", "values", "counts"),
    [
        ("positions", list(range(7)), (3, 0)),
        ("positions", [0, 1, 2, 0, 1, 0, 0], (3, 0)),
        ("labels", [6, 7, 256, 8, 256, -100, -100], (0, 1)),
        ("labels", [5, 6, 7, -100, 8, -100, -100], (0, 4)),
        ("labels", [-100] * 7, (0, 0)),
    ],
)
def test_what_is_out_of_place_is_counted(name, values, counts):
    batch = tensors(packing.pack_batch(PACK))
    assert misplaced({**batch, name: torch.tensor(values)}) == counts


def test_rows_that_begin_anywhere_but_at_zero_are_counted():
    batch = tensors(packing.row_batch([np.arange(4, dtype=np.uint16)] * 2))
    assert misplaced({**batch, "positions": batch["positions"] + 1}) == (6, 0)
    assert misplaced({**batch, "labels": batch["labels"].roll(1, -1)}) == (0, 4)


def test_positions_in_the_wrong_place_are_red(run, monkeypatch):
    original = packing.pack_batch

    def rolled(pack):
        batch = original(pack)
        return {**batch, "positions": np.roll(batch["positions"], 3)}

    monkeypatch.setattr(packing, "pack_batch", rolled)
    report = run(precision="bf16", layout="thd", steps=1)
    assert red(report) == {"preflight", "packed_parity"}
    assert "wrong position" in finding(report, "preflight")["measured"]


def test_a_sequence_alone_is_placed_without_the_batch(monkeypatch):
    """The comparison must not take the pack's own positions for its reference."""
    session = small_session(precision="bf16", layout="thd")
    assert max(row.relative_error for row in packed_twins(session)) < 1e-9
    session.batches[0]["positions"] = session.batches[0]["positions"].roll(3)
    assert max(row.relative_error for row in packed_twins(session)) > 1e-3
    assert [row.value for row in preflight_rows(session) if row.quantity == "tokens at a wrong position"][0] > 0
