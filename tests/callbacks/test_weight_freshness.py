"""WeightFreshness: leaves take turns, a stale operand is counted and placed, state goes through a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smoke.callbacks import WeightFreshness

FRESH = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
OTHER = torch.tensor([1.0, 4.0], dtype=torch.bfloat16)


class Source:
    """A backend with three leaves, of which one may multiply something else."""

    def __init__(self, used: dict[str, tuple[Any, ...]] | None = None):
        self.used = used or {}
        self.watched: tuple[str, ...] = ()
        self.log: list[tuple[str, ...]] = []

    def modules(self):
        return ["a", "b", "c"]

    def watch(self, modules):
        self.watched = tuple(modules)
        self.log.append(self.watched)

    def take(self):
        for module in self.watched:
            for parameter in ("weight0", "weight1"):
                used = self.used.get(module, (FRESH,)) if parameter == "weight1" else (FRESH,)
                yield SimpleNamespace(module=module, parameter=parameter, direction="row", used=used, fresh=(FRESH,))


def _train(source: Source, steps: int, every: int) -> WeightFreshness:
    callback = WeightFreshness(source, every=every)
    for step in range(steps):
        trainer = SimpleNamespace(global_step=step)
        callback.on_train_batch_start(trainer, None, None, step)
        callback.on_after_backward(trainer, None)
    callback.on_train_end(None, None)
    return callback


def test_leaves_take_turns_after_the_first_update():
    source = Source()
    callback = _train(source, 5, 2)
    assert source.log == [(), ("a", "c"), ("b",), ("a", "c"), ("b",), ()]
    assert [(row.step, row.module, row.operands, row.elements, row.stale) for row in callback.rows] == [
        (1, "a", 2, 4, 0),
        (1, "c", 2, 4, 0),
        (2, "b", 2, 4, 0),
        (3, "a", 2, 4, 0),
        (3, "c", 2, 4, 0),
        (4, "b", 2, 4, 0),
    ]


@pytest.mark.parametrize(
    ("used", "hexes"),
    [
        ((OTHER,), ("0x4080", "0x4000")),
        ((FRESH.float(),), ("(2,) torch.float32", "(2,) torch.bfloat16")),
        ((FRESH, FRESH), ("2 tensors", "1 tensors")),
    ],
)
def test_a_stale_operand_is_counted_and_placed(used, hexes):
    rows = _train(Source({"b": used}), 3, 1).rows
    assert [(row.step, row.module) for row in rows if row.stale] == [(1, "b"), (2, "b")]
    stale = next(row for row in rows if row.stale)
    assert (stale.stale, stale.operands, stale.parameter) == (1, 2, "weight1")
    assert (stale.used_hex, stale.fresh_hex) == hexes


def test_state_goes_through_a_checkpoint():
    callback, other = _train(Source(), 3, 1), WeightFreshness(Source())
    other.load_state_dict(callback.state_dict())
    assert other.rows == callback.rows
    assert len(other.rows) == 6


def test_every_has_to_be_positive():
    with pytest.raises(ValueError, match="every"):
        WeightFreshness(Source(), every=0)
