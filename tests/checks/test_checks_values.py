"""quantizer, absorbed_parity, packed_parity and finite."""

import math

import pytest
from sound_record import Case

from smoke.record import FiniteRow, TwinRow


@pytest.fixture
def case():
    return Case()


def test_one_wrong_code_is_red_and_named(case):
    finding = case.spoil("quantizer", mismatches=1, detail="block 3").only_red("FAIL", "quantizer")
    assert (finding.where, finding.measured, finding.detail) == ("mxfp8 blocks", "1 of 64 differ", "block 3")


def test_a_case_without_elements_is_an_error(case):
    assert case.spoil("quantizer", elements=0).only_red("ERROR", "quantizer").where == "mxfp8 blocks"


@pytest.mark.parametrize("kind", ["absorbed", "packed"])
@pytest.mark.parametrize("error", [2e-9, math.nan, math.inf])
def test_twins_that_disagree(case, kind, error):
    finding = case.spoil("twins", {"kind": kind}, relative_error=error).only_red("FAIL", f"{kind}_parity")
    assert finding.where == "logits"


def test_the_worst_tensor_is_named_and_nan_is_worst(case):
    case.record.twins += [
        TwinRow(kind="absorbed", tensor="grad a", relative_error=math.nan),
        TwinRow(kind="absorbed", tensor="grad b", relative_error=1.0),
    ]
    finding = case.only_red("FAIL", "absorbed_parity")
    assert (finding.where, finding.detail) == ("grad a", "2 of 3 tensors over")


def test_one_form_that_ran_twice_is_an_error(case):
    case.spoil("twins", {"kind": "absorbed"}, relative_error=0.0)
    assert "one form ran twice" in case.only_red("ERROR", "absorbed_parity").detail


@pytest.mark.parametrize("error", [1e-300, math.nan])
def test_a_leak_of_one_bit_is_red(case, error):
    case.record.twins.append(TwinRow(kind="packed_leak", tensor="sequence 1", relative_error=error))
    assert case.only_red("FAIL", "packed_parity").where == "sequence 1"


def test_a_leak_that_nobody_looked_for_is_an_error(case):
    case.record.twins = [row for row in case.record.twins if row.kind != "packed_leak"]
    assert "no sequence was changed" in case.only_red("ERROR", "packed_parity").detail


def test_leak_rows_alone_measure_nothing(case):
    case.record.twins = [TwinRow(kind="packed_leak", tensor="sequence 1", relative_error=0.0)]
    case.only_red("ERROR", "absorbed_parity", "packed_parity")


@pytest.mark.parametrize("kind", ["loss", "input", "output_gradient", "gradient", "weight"])
def test_offenders_are_named(case, kind):
    case.record.finite = [FiniteRow(step=4, kind=kind, name="layers.1.weight", nan=2, inf=1)] * 2
    finding = case.only_red("FAIL", "finite")
    assert (finding.where, finding.measured) == (f"step 4 {kind} layers.1.weight", "2 NaN, 1 inf")
    assert "2 tensors" in finding.detail


@pytest.mark.parametrize("kind", ["loss", "input", "output_gradient", "gradient", "weight"])
def test_a_kind_of_tensor_that_nobody_looked_at(case, kind):
    case.record.finite_kinds = tuple(k for k in case.record.finite_kinds if k != kind)
    assert case.only_red("ERROR", "finite").detail == f"looked at no {kind}"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradient_norm_that_is_not_finite(case, value):
    assert case.spoil("steps", {"step": 7}, grad_norm=value).only_red("FAIL", "finite").where == "step 7 gradient norm"


def test_a_batch_whose_every_label_is_ignored(case):
    case.spoil("steps", {"step": 1}, tokens=0)
    assert case.only_red("FAIL", "finite").where == "step 1 batch"


def test_loss_that_is_not_finite(case):
    case.spoil("steps", {"step": 3}, loss=math.nan, loss_hex="nan")
    findings = case.findings()
    assert findings["finite"].where == "step 3 loss"
    assert findings["loss_tracking"].status == "FAIL"


def test_looking_at_nothing_or_not_at_every_step_is_an_error(case):
    case.record.finite_steps = 9
    assert "9 of 10" in case.only_red("ERROR", "finite").detail
    case.record.finite_looked = 0
    assert "0 tensors" in case.only_red("ERROR", "finite").detail
