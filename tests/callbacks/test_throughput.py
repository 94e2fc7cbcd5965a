"""Throughput: phases, what is excluded, and how the clock is bracketed inside a Trainer."""

import lightning
import pytest
from callback_toys import Toy, fit, make_batches

from smoke.callbacks import Throughput
from smoke.callbacks.throughput import ThroughputMeter
from smoke.record import percentile


class _Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def _step(meter, clock, number, *, forward=1.0, backward=2.0, between=0.0, after=0.0, tokens=10):
    meter.resume("forward")
    clock.now += forward
    meter.pause()
    clock.now += between
    meter.resume("backward")
    clock.now += backward
    meter.pause()
    meter.count(tokens)
    meter.finish(number)
    clock.now += after


def test_meter_excludes_warm_up_and_what_happens_between():
    clock = _Clock()
    meter = ThroughputMeter(warmup_steps=1, clock=clock)
    _step(meter, clock, 0, forward=100.0, between=50.0, after=25.0, tokens=1000)
    _step(meter, clock, 1, between=4.0, after=16.0)
    _step(meter, clock, 2, forward=3.0, tokens=20)
    summary = meter.summary("emulation")
    assert (summary.warmup_steps, summary.measured_steps, summary.tokens) == (1, 2, 30)
    assert summary.step_time_sum_ms == pytest.approx(8000.0)
    assert summary.excluded_ms == pytest.approx(20000.0)
    assert summary.wall_ms == pytest.approx(28000.0)
    assert summary.tokens_per_s == pytest.approx(30 / 8)
    assert (summary.forward_ms_p50, summary.backward_ms_p50) == (pytest.approx(2000.0), pytest.approx(2000.0))
    assert summary.step_time_ms_p50 == pytest.approx(4000.0)
    assert summary.step_time_ms_p95 == pytest.approx(4900.0)
    assert summary.label == "emulation"


def test_nothing_measured_gives_no_summary():
    clock = _Clock()
    meter = ThroughputMeter(warmup_steps=2, clock=clock)
    _step(meter, clock, 0)
    assert meter.summary("native") is None


def test_device_is_awaited_before_every_reading():
    clock, order = _Clock(), []
    meter = ThroughputMeter(
        warmup_steps=0, clock=lambda: order.append("clock") or clock(), synchronize=lambda: order.append("wait")
    )
    _step(meter, clock, 0)
    assert order == ["wait", "clock"] * 4


def test_wall_does_not_run_while_the_process_is_down():
    clock = _Clock()
    meter = ThroughputMeter(warmup_steps=1, clock=clock)
    for number in range(2):
        _step(meter, clock, number, after=1.0)
    later = _Clock()
    later.now = 1e6
    resumed = ThroughputMeter(warmup_steps=1, clock=later)
    resumed.load(meter.state())
    _step(resumed, later, 2, between=5.0)
    summary = resumed.summary("native")
    assert summary.measured_steps == 2
    assert summary.wall_ms == pytest.approx(11000.0)
    assert summary.excluded_ms == pytest.approx(5000.0)
    assert summary.step_time_sum_ms == pytest.approx(6000.0)


def test_percentile_interpolates():
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([1.0], 95) == 1.0
    assert percentile([], 50) != percentile([], 50)


class _Slow(lightning.Callback):
    """Spends time in every hook, as a gradient comparison does."""

    def __init__(self, clock, seconds):
        self._clock, self._seconds = clock, seconds

    def _spend(self, *args):
        self._clock.now += self._seconds

    on_train_batch_start = on_before_zero_grad = on_before_backward = on_after_backward = _spend
    on_before_optimizer_step = on_train_batch_end = _spend


def _slow_module(clock):
    """Forward takes 1 s, backward 2 s, zeroing 0.25 s, the optimizer 0.5 s, validation 1000 s."""

    class Timed(Toy):
        def training_step(self, batch, batch_idx):
            clock.now += 1.0
            return super().training_step(batch, batch_idx)

        def optimizer_zero_grad(self, *args):
            clock.now += 0.25
            super().optimizer_zero_grad(*args)

        def backward(self, loss):
            clock.now += 2.0
            super().backward(loss)

        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            clock.now += 0.5

        def validation_step(self, batch, batch_idx):
            clock.now += 1000.0

    return Timed()


def test_slow_callbacks_and_validation_do_not_count():
    clock = _Clock()
    throughput = Throughput(label="native", clock=clock)
    callbacks = throughput.around([_Slow(clock, 10.0), _Slow(clock, 20.0)])
    fit(_slow_module(clock), make_batches(5), callbacks, validation=make_batches(1), val_check_interval=1)
    assert [s.step for s in throughput.meter.steps] == [0, 1, 2, 3, 4]
    assert {s.step_time_ms for s in throughput.meter.steps} == {3750.0}
    assert {(s.forward_ms, s.backward_ms) for s in throughput.meter.steps} == {(1000.0, 2000.0)}
    summary = throughput.summary()
    assert (summary.measured_steps, summary.tokens) == (3, 23)
    assert summary.step_time_sum_ms + summary.excluded_ms == summary.wall_ms
    assert summary.excluded_ms == pytest.approx((3 * 4 * 30.0 + 2 * (30.0 + 1000.0 + 30.0)) * 1e3)


def test_accumulated_micro_batches_make_one_step():
    clock = _Clock()
    throughput = Throughput(label="native", warmup_steps=0, clock=clock)
    fit(
        _slow_module(clock),
        make_batches(4),
        throughput.around([]),
        validation=make_batches(1),
        accumulate_grad_batches=2,
    )
    assert [(s.step, s.tokens, s.step_time_ms) for s in throughput.meter.steps] == [(0, 15, 6750.0), (1, 15, 6750.0)]


def test_half_a_bracket_is_refused():
    throughput = Throughput(label="native")
    with pytest.raises(ValueError, match="around"):
        fit(Toy(), make_batches(1), [throughput])
    with pytest.raises(ValueError, match="around"):
        fit(Toy(), make_batches(1), [throughput.closing, throughput])
