"""weight_freshness: one stale operand is enough, and what was not compared is no PASS."""

import dataclasses

import pytest
from sound_record import QUANTIZED, Case


@pytest.fixture
def case():
    return Case()


def test_a_stale_weight_is_red_and_named(case):
    place = {"parameter": "weight3", "used_hex": "0x3f80", "fresh_hex": "0x3f81"}
    case.spoil("freshness", {"module": QUANTIZED[1], "step": 5}, stale=1, **place)
    finding = case.only_red("FAIL", "weight_freshness")
    assert finding.where == f"step 5 {QUANTIZED[1]}.weight3 (row operand)"
    assert "0x3f80 multiplied, 0x3f81" in finding.detail


def test_the_earliest_stale_weight_is_named(case):
    case.spoil("freshness", {"module": QUANTIZED[0]}, stale=1)
    case.record.freshness.reverse()
    assert case.only_red("FAIL", "weight_freshness").where.startswith("step 1 ")


@pytest.mark.parametrize("direction", ["row", "col"])
def test_a_leaf_that_was_never_compared_is_no_pass(case, direction):
    case.record.freshness = [
        row for row in case.record.freshness if (row.module, row.direction) != (QUANTIZED[2], direction)
    ]
    finding = case.only_red("ERROR", "weight_freshness")
    assert finding.where == QUANTIZED[2]
    assert direction in finding.detail


@pytest.mark.parametrize("changes", [{"operands": 0}, {"elements": 0}, {"step": 0}])
def test_an_empty_or_early_comparison_is_no_pass(case, changes):
    case.record.freshness[0] = dataclasses.replace(case.record.freshness[0], **changes)
    case.only_red("ERROR", "weight_freshness")


def test_nothing_measured(case):
    case.record.freshness = []
    case.only_red("ERROR", "weight_freshness")


def test_a_conversion_that_matched_nothing_has_no_weight_to_look_at(case):
    case.record.freshness = []
    case.spoil("coverage", quantized_calls=0)
    finding = case.findings()["weight_freshness"]
    assert (finding.status, finding.detail) == ("FAIL", "conversion matched nothing")
