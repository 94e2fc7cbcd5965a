"""gradient_parity, quantization_engaged and gradient_presence."""

import math

import pytest
from sound_record import Case, make_plan

from smoke.checks.gradients import UPPER

WHOLE = {"routing": "replayed", "parameter": "a.weight", "slice": "", "step": 5}
SLICE = {"routing": "replayed", "parameter": "a.weight", "slice": "head 1", "step": 5}


def every_step(which):
    return {key: value for key, value in which.items() if key != "step"}


@pytest.fixture
def case():
    return Case()


def test_too_wrong_as_a_whole(case):
    finding = case.spoil("gradients", every_step(WHOLE), relative_error=0.11).only_red("FAIL", "gradient_parity")
    assert finding.where.startswith("a.weight step")
    assert "<= 0.1" in finding.limit


def test_too_wrong_on_one_slice(case):
    finding = case.spoil("gradients", every_step(SLICE), relative_error=0.21).only_red("FAIL", "gradient_parity")
    assert finding.where.startswith("a.weight[head 1] step")
    assert "<= 0.2" in finding.limit


def test_a_gradient_that_nearly_cancels_in_one_step_is_no_fault(case):
    case.spoil("gradients", WHOLE, relative_error=3.0)
    assert case.findings()["gradient_parity"].status == "PASS"


def test_most_parameters_too_wrong_in_one_step(case):
    finding = case.spoil("gradients", {"slice": "", "step": 5, "routing": "replayed"}, relative_error=0.4)
    finding = finding.only_red("FAIL", "gradient_parity")
    assert "median" in finding.measured
    assert finding.detail == "step 5"


def test_slice_limit_is_not_the_whole_parameters(case):
    case.spoil("gradients", every_step(SLICE), relative_error=0.19)
    assert case.findings()["gradient_parity"].status == "PASS"


def test_too_wrong_with_routing_free(case):
    case.spoil("gradients", {"routing": "free"}, relative_error=0.6)
    assert "routing free" in case.only_red("FAIL", "gradient_parity").measured


def test_an_expert_that_won_its_only_token_with_routing_free_is_no_fault(case):
    which = {"routing": "free", "parameter": "b.weight"}
    case.spoil("gradients", which, relative_error=math.inf, cosine=0.0, norm=0.1, reference_norm=0.0)
    assert case.findings()["gradient_parity"].status == "PASS"
    case.spoil("gradients", which, norm=10.0)
    assert case.findings()["gradient_parity"].status == "FAIL"


def test_too_right_in_the_median(case):
    case.spoil("gradients", {"quantized": True, "slice": "", "step": 5}, relative_error=0.0)
    case.spoil("gradients", {"quantized": True, "slice": "", "step": 0}, relative_error=0.009)
    finding = case.only_red("FAIL", "gradient_parity", "quantization_engaged")
    assert ">= 0.01" in finding.limit


@pytest.mark.parametrize("field", ["relative_error", "cosine", "norm", "reference_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", [WHOLE, SLICE, WHOLE | {"routing": "free", "step": 0}])
def test_not_finite_is_red(case, field, value, which):
    assert "not finite" in case.spoil("gradients", which, **{field: value}).only_red("FAIL", "gradient_parity").detail


@pytest.mark.parametrize(
    ("gone", "detail"),
    [
        (lambda row: row.routing == "free", "routing free"),
        (lambda row: row.routing == "replayed" and row.slice, "no slice"),
        (lambda row: row.step == 5, "no comparison at step 5"),
    ],
)
def test_what_was_not_compared_is_an_error(case, gone, detail):
    case.record.gradients = [row for row in case.record.gradients if not gone(row)]
    assert detail in case.only_red("ERROR", "gradient_parity").detail


def test_the_first_comparison_follows_the_recipes_warm_up(case):
    case.plan.recipe.warmup_steps = 1
    assert "no comparison at step 1" in case.only_red("ERROR", "gradient_parity").detail
    case.spoil("gradients", {"step": 0}, step=1)
    case.spoil("gradients", {"step": 5}, step=6)
    assert case.findings()["gradient_parity"].status == "PASS"


def test_limits_that_are_missing_or_nan_pass_nothing(case):
    case.plan.recipe.limits.gradient_error_slice_max = None
    assert "gradient_error_slice_max" in case.only_red("ERROR", "gradient_parity").detail
    case.plan.recipe.limits.gradient_error_slice_max = math.nan
    case.only_red("FAIL", "gradient_parity")


def test_bf16_run_that_equals_its_twin(case):
    case.plan = make_plan("bf16", required=("gradient_parity",))
    for field in (*UPPER, "gradient_error_min"):
        setattr(case.plan.recipe.limits, field, 0.0)
    case.spoil("gradients", relative_error=0.0, quantized=False)
    assert case.findings()["gradient_parity"].status == "PASS"
    case.spoil("gradients", WHOLE, relative_error=1e-9)
    case.only_red("FAIL", "gradient_parity")


def test_conversion_that_matched_nothing_is_not_engaged(case):
    case.spoil("gradients", quantized=False, relative_error=0.0)
    assert "matched nothing" in case.only_red("FAIL", "quantization_engaged").detail


def test_one_parameter_that_equals_bf16_is_named(case):
    case.spoil("gradients", {"parameter": "b.weight"}, relative_error=0.001)
    case.spoil("gradients", {"parameter": "a.weight"}, relative_error=0.09)
    assert case.only_red("FAIL", "quantization_engaged").where == "b.weight"


def test_an_idle_expert_is_neither_wrong_nor_unengaged(case):
    case.spoil("gradients", {"parameter": "b.weight"}, relative_error=0.0, cosine=1.0, norm=0.0, reference_norm=0.0)
    assert {f.status for f in case.findings().values()} == {"PASS"}


def test_nan_is_not_engaged(case):
    case.spoil("gradients", {"parameter": "b.weight", "routing": "replayed"}, relative_error=math.nan)
    case.only_red("FAIL", "gradient_parity", "quantization_engaged")


def test_engagement_needs_a_limit(case):
    case.plan.recipe.limits.gradient_error_min = 0.0
    case.only_red("ERROR", "quantization_engaged")


@pytest.mark.parametrize(
    ("changes", "measured"),
    [({"present_steps": 9, "nonzero_steps": 9}, "present in 9 of 10"), ({"nonzero_steps": 0}, "not zero in 0 of 10")],
)
def test_lost_gradients_are_named(case, changes, measured):
    finding = case.spoil("presence", {"parameter": "a.weight"}, **changes).only_red("FAIL", "gradient_presence")
    assert finding.where == "a.weight"
    assert measured in finding.measured


def test_presence_that_looked_at_nothing(case):
    case.spoil("presence", {"parameter": "experts.weight3"}, may_be_zero=False)
    assert case.only_red("ERROR", "gradient_presence").where == "experts.weight3"
    case.record.presence = case.record.presence[1:]
    case.only_red("ERROR", "gradient_presence")


@pytest.mark.parametrize("step", [0, 5])
def test_a_parameter_that_was_not_compared_is_an_error(case, step):
    """In one step, or never although the run has it: the presence rows name all parameters."""
    rows = case.record.gradients
    case.record.gradients = [row for row in rows if (row.step, row.parameter) != (step, "experts.weight3")]
    assert case.only_red("ERROR", "gradient_parity").detail == f"experts.weight3 was not compared at step {step}"
    case.record.gradients = [row for row in rows if row.parameter != "experts.weight3"]
    assert case.only_red("ERROR", "gradient_parity").detail == "experts.weight3 was not compared at step 0"
