"""StepLog and Coverage: rows handed on at once, merged from the same step; rows read at the end or at a crash."""

import pytest
from callback_toys import Toy, fit, make_batches

from smoke.callbacks import Coverage, LossTracker, StepLog, Throughput
from smoke.callbacks.loss_tracker import LossSample
from smoke.callbacks.step_log import merge
from smoke.callbacks.throughput import TimedStep
from smoke.record import CoverageRow


def _coverage(calls):
    return CoverageRow(
        module="m", gemm="output", format="e4m3 x e4m3", planned=True, reason="recipe", quantized_calls=calls,
        bf16_calls=0, replay_quantized_calls=0, replay_bf16_calls=0,
    )  # fmt: skip


def test_rows_of_different_steps_do_not_merge():
    sample = LossSample(step=1, loss=1.0, loss_hex="x", grad_norm=1.0, tokens=8, positions=10, batch_sha256="aa")
    timed = TimedStep(step=2, tokens=8, step_time_ms=3.0, forward_ms=1.0, backward_ms=2.0)
    with pytest.raises(ValueError, match="step 1.*step 2"):
        merge(sample, timed)


def test_each_step_is_written_when_it_ends():
    rows = []
    module, loss, throughput = Toy(), LossTracker(lambda batch: "aa"), Throughput(label="native")
    fit(module, make_batches(3), throughput.around([loss, StepLog(loss, throughput, rows.append)]))
    assert [r.step for r in rows] == [0, 1, 2]
    assert [r.loss for r in rows] == module.seen
    assert [float.fromhex(r.loss_hex) for r in rows] == module.seen
    assert [(r.tokens, r.padded_tokens, r.batch_sha256) for r in rows] == [(8, 10, "aa"), (7, 10, "aa"), (8, 10, "aa")]
    assert [r.step_time_ms for r in rows] == [s.step_time_ms for s in throughput.meter.steps]
    assert all(r.step_time_ms > r.forward_ms > 0 < r.backward_ms for r in rows)


def test_rows_are_there_when_the_run_dies():
    class Dying(Toy):
        def training_step(self, batch, batch_idx):
            if len(self.seen) == 2:
                raise RuntimeError("power cut")
            return super().training_step(batch, batch_idx)

    rows, counted = [], [_coverage(1)]
    loss, throughput, coverage = LossTracker(), Throughput(label="native"), Coverage(lambda: counted)
    callbacks = throughput.around([loss, StepLog(loss, throughput, rows.append), coverage])
    with pytest.raises(RuntimeError, match="power cut"):
        fit(Dying(), make_batches(4), callbacks)
    assert [r.step for r in rows] == [0, 1]
    assert coverage.rows == counted


def test_coverage_is_read_at_the_end():
    module = Toy()
    coverage = Coverage(lambda: [_coverage(len(module.seen))])
    fit(module, make_batches(3), [coverage])
    assert coverage.rows == [_coverage(3)]
