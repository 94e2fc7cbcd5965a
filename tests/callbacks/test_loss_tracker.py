"""LossTracker: undivided losses, token counts, gradient norms before clipping, batch hashes, state."""

import hashlib
import math

import lightning
import pytest
import torch
from callback_toys import Toy, fit, make_batches

from smoke.callbacks import LossTracker
from smoke.callbacks.loss_tracker import LossMeter, gradient_norm


def _sha256(batch):
    return hashlib.sha256(batch["tokens"].numpy().tobytes()).hexdigest()


class _Reader(lightning.Callback):
    """What Lightning itself hands to on_train_batch_end."""

    def __init__(self):
        self.outputs = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(float(outputs["loss"]))


def test_meter_of_one_micro_batch_keeps_every_bit():
    meter = LossMeter()
    meter.micro_batch(0.1, 8, 10, "aa")
    sample = meter.finish(3, 2.5)
    assert sample.loss == 0.1
    assert float.fromhex(sample.loss_hex) == 0.1
    assert (sample.step, sample.grad_norm, sample.tokens, sample.positions, sample.batch_sha256) == (
        3,
        2.5,
        8,
        10,
        "aa",
    )


def test_meter_takes_the_mean_over_micro_batches():
    meter = LossMeter()
    meter.micro_batch(1.0, 8, 10, "aa")
    meter.micro_batch(2.0, 7, 10, "bb")
    sample = meter.finish(0, 1.0)
    assert (sample.loss, sample.tokens, sample.positions) == (1.5, 15, 20)
    assert sample.batch_sha256 == hashlib.sha256(b"aabb").hexdigest()


def test_gradient_norm_is_summed_in_float64():
    big, small = torch.full((1,), 2.0**12), torch.full((2**12,), 2.0**-3)
    expected = math.sqrt(2.0**24 + 2.0**12 * 2.0**-6)
    assert float(gradient_norm([big, small])) == expected
    assert float(gradient_norm([])) == 0.0


def test_losses_without_accumulation_are_exact():
    module, tracker = Toy(), LossTracker(_sha256)
    items = make_batches(4)
    fit(module, items, [tracker])
    assert [s.loss for s in tracker.samples] == module.seen
    assert [s.step for s in tracker.samples] == [0, 1, 2, 3]
    assert [s.tokens for s in tracker.samples] == [8, 7, 8, 7]
    assert [s.positions for s in tracker.samples] == [10] * 4
    assert [s.batch_sha256 for s in tracker.samples] == [_sha256(b) for b in items]
    assert tracker.tokens() == 30
    weighted = sum(loss * n for loss, n in zip(module.seen, (8, 7, 8, 7), strict=True)) / 30
    assert tracker.mean_loss() == pytest.approx(weighted, rel=1e-12)


@pytest.mark.parametrize("count", [2, 3])
def test_lightning_divides_and_the_tracker_does_not(count):
    module, tracker, reader = Toy(), LossTracker(), _Reader()
    fit(module, make_batches(2 * count), [tracker, reader], accumulate_grad_batches=count)
    assert reader.outputs == pytest.approx([loss / count for loss in module.seen], rel=1e-6)
    own = [sum(module.seen[i : i + count]) / count for i in (0, count)]
    assert [s.loss for s in tracker.samples] == pytest.approx(own, rel=0 if count == 2 else 1e-7)


def test_short_last_accumulation_is_the_mean_of_what_ran():
    module, tracker = Toy(), LossTracker()
    fit(module, make_batches(3), [tracker], accumulate_grad_batches=2)
    assert [s.loss for s in tracker.samples] == [sum(module.seen[:2]) / 2, module.seen[2]]


def test_gradient_norm_is_that_before_clipping():
    free, clipped = LossTracker(), LossTracker()
    fit(Toy(), make_batches(1), [free])
    fit(Toy(), make_batches(1), [clipped], gradient_clip_val=1e-3)
    assert clipped.samples[0].grad_norm == free.samples[0].grad_norm > 1e-2


def test_nan_loss_stays_nan():
    items = make_batches(1)
    items[0]["labels"].fill_(-100)
    tracker = LossTracker()
    fit(Toy(), items, [tracker])
    assert math.isnan(tracker.samples[0].loss)
    assert (tracker.samples[0].loss_hex, tracker.samples[0].tokens) == ("nan", 0)


def test_state_survives():
    first, second = LossTracker(), LossTracker()
    first.meter.micro_batch(1.0, 8, 10, "aa")
    first._aggregate(first.meter.finish(0, 1.0))
    first.meter.micro_batch(2.0, 8, 10, "bb")
    second.load_state_dict(first.state_dict())
    second.meter.micro_batch(4.0, 8, 10, "cc")
    assert second.meter.finish(1, 1.0).loss == 3.0
    assert (second.tokens(), second.mean_loss()) == (8, 1.0)
    assert len(first.samples) == 1
