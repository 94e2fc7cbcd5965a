"""loss_tracking, throughput and memory."""

import dataclasses
import math

import pytest
from sound_record import Case, make_plan


@pytest.fixture
def case():
    return Case()


def _run(case, losses):
    """Give the run these losses, in the curve and in the step rows alike."""
    for step, loss in enumerate(losses):
        case.spoil("steps", {"step": step}, loss=loss, loss_hex=loss.hex())
    return case.curves(run=tuple(losses))


def _twin(case):
    return case.record.curves.twin


def test_the_gap_is_the_median_of_the_late_steps(case):
    _run(case, [loss + (3.0 if step < 5 else 0.009) for step, loss in enumerate(_twin(case))])
    finding = case.findings()["loss_tracking"]
    assert finding.status == "PASS"
    assert "median gap 0.009 nats" in finding.measured
    assert "another seed" in finding.detail
    _run(case, [loss + 0.011 for loss in _twin(case)])
    finding = case.only_red("FAIL", "loss_tracking")
    assert "too far" in finding.detail
    assert finding.where.startswith("widest at step")


def test_three_times_the_floor_is_allowed_where_it_is_more(case):
    case.plan.recipe.limits.loss_gap_max = 0.001
    _run(case, [loss + 0.002 for loss in _twin(case)])
    assert case.findings()["loss_tracking"].status == "PASS"
    _run(case, [loss + 0.0023 for loss in _twin(case)])
    case.only_red("FAIL", "loss_tracking")


def test_a_run_that_is_its_own_twin_was_not_quantized(case):
    _run(case, _twin(case))
    assert "nothing was quantized" in case.only_red("FAIL", "loss_tracking").detail
    case.plan = make_plan("bf16", required=("loss_tracking",))
    assert case.findings()["loss_tracking"].status == "PASS"


def test_a_loss_that_does_not_fall(case):
    twin = [5.0] * 10
    case.curves(twin=tuple(twin), perturbed=((5.001,) * 10, (4.999,) * 10))
    _run(case, [loss + 0.001 for loss in twin])
    assert "does not fall" in case.only_red("FAIL", "loss_tracking").detail


def test_loss_divided_by_the_accumulation_count(case):
    _run(case, [loss / 2 for loss in _twin(case)])
    assert "too far" in case.only_red("FAIL", "loss_tracking").detail


def test_logged_loss_that_is_not_the_curves(case):
    case.spoil("steps", {"step": 4}, loss_hex=(1.0).hex())
    assert case.only_red("FAIL", "loss_tracking").where == "step 4"


def test_below_the_entropy_of_the_data(case):
    case.record.entropy_floor = 5.0
    assert "entropy" in case.only_red("FAIL", "loss_tracking").detail
    case.record.entropy_floor = None
    assert case.findings()["loss_tracking"].status == "PASS"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite(case, value):
    losses = list(case.record.curves.run)
    losses[6] = value
    _run(case, losses)
    findings = case.findings()
    assert (findings["loss_tracking"].status, findings["loss_tracking"].where) == ("FAIL", "step 6")


def test_curves_that_cannot_be_judged(case):
    sound = case.record.curves
    for changes in (
        {"twin": ()},
        {"perturbed": ()},
        {"twin": sound.twin[:-1]},
        {"perturbed": (sound.twin[:-1],)},
        {"twin": (math.nan, *sound.twin[1:])},
        {"perturbed": ((math.inf, *sound.twin[1:]),)},
        {"run": sound.run[:5], "twin": sound.twin[:5], "perturbed": (sound.twin[:5],)},
    ):
        case.record.curves = dataclasses.replace(sound, **changes)
        case.only_red("ERROR", "loss_tracking")
    case.record.curves = sound
    case.plan.recipe.limits.loss_gap_max = None
    case.only_red("ERROR", "loss_tracking")


def test_a_missing_step_is_not_taken_as_equal(case):
    case.spoil("steps", {"step": 4}, step=5)
    case.only_red("ERROR", "loss_tracking")


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"tokens": 8 * 1024}, "tokens counted"),
        ({"warmup_steps": 0}, "0 for warm-up"),
        ({"measured_steps": 10}, "10 of 10 steps measured"),
        ({"tokens_per_s": 1e6}, "tokens_per_s is 1e+06"),
        ({"step_time_ms_p50": 500.0}, "step_time_ms_p50"),
        ({"step_time_ms_p95": 500.0}, "step_time_ms_p95"),
        ({"forward_ms_p50": 1.0}, "forward_ms_p50"),
        ({"backward_ms_p50": 1.0}, "backward_ms_p50"),
        ({"wall_ms": 100.0, "excluded_ms": 0.0}, "the clock saw 100.000"),
        ({"excluded_ms": 0.0}, "is not the clock's"),
        ({"label": "native"}, "labelled 'native'"),
    ],
)
def test_inconsistent_timing(case, changes, detail):
    assert detail in case.timing(**changes).only_red("FAIL", "throughput").detail


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
@pytest.mark.parametrize("field", ["tokens_per_s", "step_time_ms_p50", "step_time_ms_p95", "forward_ms_p50",
                                   "backward_ms_p50", "step_time_sum_ms", "wall_ms"])  # fmt: skip
def test_times_that_are_no_times(case, field, value):
    case.timing(**{field: value}).only_red("FAIL", "throughput")


@pytest.mark.parametrize("took", [750.0, math.nan, math.inf])
def test_comparisons_that_the_clock_did_not_leave_out(case, took):
    case.record.comparison_ms[5] = took
    assert "gradient comparisons took" in case.only_red("FAIL", "throughput").detail


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e6])
def test_excluded_time_that_is_no_time(case, value):
    case.timing(excluded_ms=value).only_red("FAIL", "throughput")


def test_validation_counted_into_a_step(case):
    summary = case.record.throughput
    case.spoil("steps", {"step": 6}, step_time_ms=106.0 + 500.0)
    case.timing(step_time_sum_ms=summary.step_time_sum_ms + 500.0)
    case.only_red("FAIL", "throughput")
    times = sorted(row.step_time_ms for row in case.record.steps[2:])
    case.timing(
        tokens_per_s=summary.tokens / (summary.step_time_sum_ms + 500.0) * 1e3,
        step_time_ms_p50=(times[3] + times[4]) / 2,
        step_time_ms_p95=times[6] + 0.65 * (times[7] - times[6]),
    )
    assert "is not the clock's" in case.only_red("FAIL", "throughput").detail


def test_warm_up_counted_into_the_aggregate(case):
    times = [row.step_time_ms for row in case.record.steps]
    case.timing(measured_steps=10, tokens=10 * 1020, step_time_sum_ms=sum(times), wall_ms=sum(times) + 700.0)
    assert "10 of 10 steps measured" in case.only_red("FAIL", "throughput").detail


@pytest.mark.parametrize("value", [math.nan, 1e9])
def test_phases_longer_than_the_step(case, value):
    case.spoil("steps", {"step": 6}, forward_ms=value)
    assert "step 6" in case.only_red("FAIL", "throughput").detail


def test_no_step_after_warm_up(case):
    case.record.throughput = None
    case.only_red("ERROR", "throughput")


def test_labels_of_other_numerics(case):
    for numerics, label in (("native", "native"), ("mixed", "emulation"), ("bf16", "bf16")):
        case.plan.numerics = numerics
        assert case.timing(label=label).findings()["throughput"].status == "PASS"


@pytest.mark.parametrize("on", [10_000, 6_500 + 501, 6_000 - 1, 10_500])
def test_bytes_that_do_not_fall_as_they_should(case, on):
    finding = case.spoil("memory", held_on_bytes=on).only_red("FAIL", "memory")
    assert finding.where == "mla_up_proj, mlp"


@pytest.mark.parametrize("on", [6_000, 6_500])
def test_arguments_may_be_held_anyway(case, on):
    case.spoil("memory", held_on_bytes=on)
    assert case.findings()["memory"].status == "PASS"


def test_a_prediction_holds_to_the_byte(case):
    case.spoil("memory", predicted_on_bytes=6_500)
    assert case.findings()["memory"].status == "PASS"
    case.spoil("memory", held_on_bytes=6_501)
    case.only_red("FAIL", "memory")
    case.spoil("memory", held_on_bytes=10_000, predicted_on_bytes=10_000)
    case.only_red("FAIL", "memory")


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({"replays": 0}, "0 replays of 1 calls"),
        ({"calls": 4}, "3 replays of 4 calls"),
        ({"released_output_bytes": 1_000}, "1,000 of 2,000"),
        ({"released_output_bytes": 2_001}, "2,001 of 2,000"),
        ({"inner_bytes": 0, "output_bytes": 0, "released_output_bytes": 0}, "discards nothing"),
    ],
)
def test_a_region_that_did_not_discard(case, changes, measured):
    finding = case.spoil("memory", {"region": "mla_up_proj"}, **changes).only_red("FAIL", "memory")
    assert finding.where == "mla_up_proj"
    assert measured in finding.measured


def test_copies_that_a_leaf_keeps_without_recompute(case):
    case.spoil("memory", {"region": "mla_up_proj"}, released_output_bytes=2_500, copy_bytes=500)
    case.spoil("memory", held_off_bytes=10_500)
    assert case.findings()["memory"].status == "PASS"


def test_every_asked_region_must_have_a_row(case):
    case.record.memory = case.record.memory[:1]
    assert case.only_red("ERROR", "memory").where == "mlp"


def test_rows_that_disagree_on_the_bytes_held(case):
    case.spoil("memory", {"region": "mlp"}, held_on_bytes=1)
    case.only_red("ERROR", "memory")
