"""judge: what runs, in which order, SKIP with its reason, nothing measured is never PASS, no torch."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from sound_record import Case, make_plan

from smoke.checks import CHECKS, judge
from smoke.record import Record


@pytest.fixture
def case():
    return Case()


def test_a_sound_record_is_green(case):
    findings = case.findings()
    assert list(findings) == list(CHECKS)
    assert {f.status for f in findings.values()} == {"PASS"}
    assert all(f.measured and f.limit for f in findings.values())


def test_an_empty_record_passes_nothing():
    findings = {f.name: f for f in judge(Record(), make_plan())}
    assert {f.status for name, f in findings.items() if name != "coverage"} == {"ERROR"}
    assert findings["coverage"].status == "FAIL"
    assert all(f.detail for f in findings.values())


def test_an_empty_record_passes_nothing_in_bf16_either():
    assert {f.status for f in judge(Record(), make_plan("bf16"))} == {"ERROR"}


def test_skipped_checks_give_their_reason_also_when_required(case):
    case.plan.required = ("finite", "coverage")
    case.plan.skipped = {"finite": "--check.skip", "preflight": "not asked for"}
    findings = case.findings()
    assert list(findings) == ["preflight", "coverage", "finite"]
    assert [f.status for f in findings.values()] == ["SKIP", "PASS", "SKIP"]
    assert (findings["finite"].detail, findings["preflight"].detail) == ("--check.skip", "not asked for")


def test_an_unknown_required_check_is_an_error(case):
    case.plan.required = ("finite", "telepathy")
    assert case.findings()["telepathy"].status == "ERROR"


def test_limits_can_be_handed_in(case):
    limits = SimpleNamespace(**vars(case.plan.recipe.limits) | {"gradient_error_max": 0.02})
    findings = {f.name: f for f in judge(case.record, case.plan, limits)}
    assert findings["gradient_parity"].status == "FAIL"


@pytest.mark.parametrize("name", ["record", "checks"])
def test_no_torch_and_no_lightning(name):
    code = f"import sys, smoke.{name}; print(sorted({{'torch', 'lightning'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
