"""``smoke selftest``: what it makes of a run's findings, and one fault and one missed fault from end to end."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest

from smoke import cli
from smoke.checks import ERROR, FAIL, PASS, SKIP, Finding
from smoke.environment import detect
from smoke.faults import Fault, by_name
from smoke.run import Outcome
from smoke.run.selftest import run_selftest, verdict_of

FAULT = Fault(
    name="toy",
    row=0,
    summary="",
    red=("coverage", "finite"),
    may_follow=("memory",),
    where="q_up",
    inject=contextlib.nullcontext,
)


def findings(**statuses: str) -> list[Finding]:
    where = {"coverage": "layers.0.q_up"}
    return [Finding(name=name, status=status, where=where.get(name, "")) for name, status in statuses.items()]


@pytest.mark.parametrize(
    ("statuses", "problem"),
    [
        ({"coverage": FAIL, "finite": ERROR}, ""),
        ({"coverage": FAIL, "finite": FAIL, "memory": FAIL, "quantizer": PASS}, ""),
        ({"coverage": PASS, "finite": FAIL}, "coverage stayed green"),
        ({"coverage": FAIL}, "finite stayed green"),
        ({"coverage": SKIP, "finite": SKIP}, "coverage stayed green; finite stayed green"),
        ({"coverage": FAIL, "finite": FAIL, "quantizer": ERROR}, "quantizer is red too"),
    ],
)
def test_red_exactly_where_the_fault_says(statuses, problem):
    assert verdict_of(FAULT, Outcome(findings(**statuses))) == (FAIL if problem else PASS, problem)


def test_the_wrong_place_is_no_success():
    elsewhere = dataclasses.replace(FAULT, where="k_up")
    found = Outcome(findings(coverage=FAIL, finite=FAIL))
    assert verdict_of(elsewhere, found) == (FAIL, "coverage does not name 'k_up'")


def test_a_crash_shows_nothing():
    broken = Outcome(findings(coverage=FAIL, finite=FAIL), crashed=True, message="ValueError: x")
    assert verdict_of(FAULT, broken) == (ERROR, "ValueError: x")
    assert verdict_of(None, broken)[0] == ERROR


def test_without_a_fault_nothing_may_be_red():
    assert verdict_of(None, Outcome(findings(coverage=PASS, finite=SKIP))) == (PASS, "")
    assert verdict_of(None, Outcome(findings(coverage=PASS, finite=ERROR)))[0] == FAIL


def test_one_fault_and_one_that_nothing_notices(tmp_path, capsys):
    real = by_name("nan-in-one-gradient")
    harmless = dataclasses.replace(real, name="harmless", inject=contextlib.nullcontext)
    cuda = dataclasses.replace(real, name="cuda", needs_cuda=True)
    environment = dataclasses.replace(detect(), devices=())
    out = tmp_path / "out"
    code = run_selftest([real, harmless, cuda], environment, ["smoke", "selftest"], out=str(out), device="cpu")
    written = json.loads((out / "selftest.json").read_text(encoding="utf-8"))
    assert (code, written["exit_code"], written["verdict"]) == (1, 1, "fail")
    rows = {row["fault"]: row for row in written["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "": PASS,
        "nan-in-one-gradient": PASS,
        "harmless": FAIL,
        "cuda": SKIP,
    }
    assert rows["nan-in-one-gradient"]["red"] == ["finite", "accumulation_parity"]
    assert "linear_proj.weight" in rows["nan-in-one-gradient"]["where"]
    assert rows["harmless"]["detail"] == "finite stayed green"
    printed = capsys.readouterr().out
    assert "1 of 3 faults shown red where they must be, 1 skipped; 1 of 1 runs without a fault green" in printed


def test_an_unknown_fault_is_wrong_usage(capsys):
    assert cli.main(["selftest", "--only", "nan-in-one-gradent"]) == 2
    assert "the nearest is nan-in-one-gradient" in capsys.readouterr().err


def test_a_folder_that_holds_something_is_refused(tmp_path, capsys):
    (tmp_path / "a").write_text("", encoding="utf-8")
    assert cli.main(["selftest", "--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
