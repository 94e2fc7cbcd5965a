"""rope_contract: every kind of row turns it red, and a kind that was not measured is an error."""

import math

import pytest
from sound_record import Case

from smoke.record import RopeRow

ERRORS = {"table": 1.0, "scale": 8.0, "forward": 3.0, "gradient": 3.0}
COUNTS = ("unwritten", "input", "repeat", "positions")


@pytest.fixture
def case():
    return Case()


@pytest.mark.parametrize("value", [1.01, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_over_its_limit_is_red_and_placed(case, kind, value):
    case.spoil("rope", {"kind": kind}, value=value * ERRORS[kind])
    finding = case.only_red("FAIL", "rope_contract")
    row = next(row for row in case.record.rope if row.kind == kind)
    assert row.tensor in finding.where
    assert "reference, 3 heads" in finding.where
    assert finding.measured.startswith(kind)
    if row.position is not None:
        assert f"at position {row.position}" in finding.where


@pytest.mark.parametrize("value", [1.0, math.nan], ids=str)
@pytest.mark.parametrize("kind", COUNTS)
def test_one_wrong_element_is_red(case, kind, value):
    case.spoil("rope", {"kind": kind}, value=value)
    assert case.only_red("FAIL", "rope_contract").measured == f"{kind} {value:.3g}"


def test_one_element_outside_is_red(case):
    case.record.rope.append(RopeRow(kind="outside", case="triton, 5 heads", tensor="key", position=None, value=1.0))
    assert case.only_red("FAIL", "rope_contract").where == "key (triton, 5 heads)"


def test_a_kind_that_nobody_knows_is_red(case):
    case.spoil("rope", {"kind": "repeat"}, kind="telepathy")
    case.only_red("FAIL", "rope_contract")


@pytest.mark.parametrize("kind", [*ERRORS, *COUNTS])
def test_a_kind_that_was_not_measured_is_an_error(case, kind):
    case.record.rope = [row for row in case.record.rope if row.kind != kind]
    assert kind in case.only_red("ERROR", "rope_contract").detail


def test_triton_without_guard_elements_is_an_error(case):
    case.plan.impl = "triton"
    assert "outside" in case.only_red("ERROR", "rope_contract").detail


@pytest.mark.parametrize("position", [0, 1, 4096, 16384])
def test_every_position_is_needed(case, position):
    case.spoil("rope", {"kind": "table", "position": position}, position=2)
    assert f"position {position}" in case.only_red("ERROR", "rope_contract").detail
