"""accumulation_parity, resume_parity, and the loss from its sums: one wrong row is enough, a missing one is no PASS."""

import math

import pytest
from sound_record import Case

from smoke.checks.steps import PARTS


@pytest.fixture
def case():
    return Case()


@pytest.mark.parametrize("error", [1e-8, math.nan, math.inf])
@pytest.mark.parametrize(("name", "where"), [("", "loss"), ("a.weight", "gradient of a.weight")])
def test_another_step_than_the_large_batchs_is_red(case, name, where, error):
    case.spoil("accumulation", {"name": name}, relative_error=error)
    assert case.only_red("FAIL", "accumulation_parity").where == where


@pytest.mark.parametrize("changes", [{"micro_batches": 1}, {"elements": 0}])
def test_an_empty_accumulation_is_no_pass(case, changes):
    case.spoil("accumulation", {"name": "a.weight"}, **changes)
    case.only_red("ERROR", "accumulation_parity")


@pytest.mark.parametrize("kept", [[], [0], [1]])
def test_accumulation_needs_the_loss_and_a_gradient(case, kept):
    case.record.accumulation = [case.record.accumulation[index] for index in kept]
    case.only_red("ERROR", "accumulation_parity")


@pytest.mark.parametrize("resumes", [1, 2])
@pytest.mark.parametrize("part", PARTS)
def test_a_value_that_a_resume_changes_is_red(case, part, resumes):
    place = {"first": "x.0", "whole": "1", "resumed": "absent"}
    case.spoil("resumed", {"part": part, "resumes": resumes}, differing=1, **place)
    finding = case.only_red("FAIL", "resume_parity")
    assert finding.where == f"resume {resumes}, step {resumes}: {part} x.0"
    assert finding.detail == "1 without a stop, absent resumed"


@pytest.mark.parametrize("resumes", [1, 2])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_was_not_compared_is_no_pass(case, part, resumes):
    case.spoil("resumed", {"part": part, "resumes": resumes}, compared=0)
    case.only_red("ERROR", "resume_parity")


@pytest.mark.parametrize("factor", [0.5, 1.001, math.nan])
def test_a_logged_loss_that_is_not_its_sums_is_red(case, factor):
    sums = list(case.record.loss_sums)
    sums[4] *= factor
    case.record.loss_sums = tuple(sums)
    assert case.only_red("FAIL", "loss_tracking").where == "step 4"


def test_a_missing_sum_is_no_pass(case):
    case.record.loss_sums = case.record.loss_sums[:-1]
    case.only_red("ERROR", "loss_tracking")
