"""Every row of the exit code table, and the precedence between them."""

from __future__ import annotations

import itertools

import pytest

from smoke.checks import ERROR, FAIL, PASS, SKIP, Finding
from smoke.plan import Refusal
from smoke.report import verdict_and_exit, worst

CODE = {PASS: 0, FAIL: 1, SKIP: 4, ERROR: 3}


def found(*statuses: str) -> list[Finding]:
    return [Finding(name=f"c{i}", status=status) for i, status in enumerate(statuses)]


@pytest.mark.parametrize(
    ("status", "expected"),
    [(PASS, ("pass", 0)), (FAIL, ("fail", 1)), (SKIP, ("unsupported", 4)), (ERROR, ("error", 3))],
)
def test_one_required_check_decides(status, expected):
    assert verdict_and_exit(found(PASS, status), ["c0", "c1"]) == expected


@pytest.mark.parametrize("statuses", list(itertools.product(CODE, repeat=3)), ids="-".join)
def test_error_goes_before_fail_before_skip(statuses):
    codes = {CODE[status] for status in statuses}
    expected = next((code for code in (3, 1, 4) if code in codes), 0)
    assert verdict_and_exit(found(*statuses), ["c0", "c1", "c2"])[1] == expected


def test_a_missing_baseline_stands_between_a_failure_and_a_skip():
    assert verdict_and_exit(found(PASS, SKIP), ["c0", "c1"], baseline_missing=True) == ("unsupported", 6)
    assert verdict_and_exit(found(FAIL, SKIP), ["c0", "c1"], baseline_missing=True) == ("fail", 1)


def test_a_required_check_without_a_finding_is_an_error():
    assert verdict_and_exit(found(PASS), ["c0", "c1"]) == ("error", 3)
    assert verdict_and_exit([], ["c0"]) == ("error", 3)


def test_checks_that_are_not_required_do_not_count():
    assert verdict_and_exit(found(PASS, FAIL, ERROR, SKIP), ["c0"]) == ("pass", 0)


def test_the_worst_of_several_findings_of_one_name_counts():
    both = [Finding(name="c0", status=PASS), Finding(name="c0", status=FAIL)]
    assert verdict_and_exit(both, ["c0"]) == ("fail", 1)
    assert verdict_and_exit(both[::-1], ["c0"]) == ("fail", 1)


def test_no_check_is_not_a_pass():
    assert verdict_and_exit([], []) == ("unsupported", 4)
    assert verdict_and_exit(found(SKIP, SKIP), []) == ("unsupported", 4)


def test_a_word_that_is_no_status_is_an_error():
    assert verdict_and_exit(found("OK"), ["c0"]) == ("error", 3)


@pytest.mark.parametrize(("signal", "code"), [(2, 130), (15, 143)])
def test_an_interruption_is_reported_whatever_the_checks_said(signal, code):
    for statuses in CODE:
        assert verdict_and_exit(found(statuses), ["c0"], interrupted_signal=signal) == ("interrupted", code)
    assert verdict_and_exit([], ["c0"], interrupted_signal=signal, crashed=True) == ("interrupted", code)


def test_a_crash_goes_before_a_failure():
    assert verdict_and_exit(found(FAIL), ["c0"], crashed=True) == ("error", 3)
    assert verdict_and_exit(found(PASS), ["c0"], crashed=True) == ("error", 3)


@pytest.mark.parametrize(("code", "verdict"), [(2, "error"), (4, "unsupported"), (5, "blocked")])
def test_a_refusal_keeps_its_code(code, verdict):
    assert verdict_and_exit([], [], refusal=Refusal(code, "no")) == (verdict, code)


@pytest.mark.parametrize(
    ("codes", "expected"), [([0, 0], 0), ([0, 4, 1], 1), ([1, 3, 4], 3), ([3, 130], 130), ([4, 5], 5), ([], 4)]
)
def test_a_matrix_ends_in_its_worst_code(codes, expected):
    assert worst(codes) == expected
