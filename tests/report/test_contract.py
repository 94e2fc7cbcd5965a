"""report.json against its schema, for every way a run can end; what the schema refuses; the summary."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import jsonschema
import pytest

from smoke.checks import ERROR, FAIL, SKIP
from smoke.config import RunConfig
from smoke.plan import CHECKS, Refusal
from smoke.record import Record, json_line
from smoke.report import build, refused, schema
from smoke.report.contract import summarize, verdict_line
from smoke.report.json_report import json_text

COMMAND = ["python", "train.py", "--data.source", "text:a file"]
VALIDATOR = jsonschema.Draft202012Validator(schema())


@pytest.fixture
def report(record, make_plan, findings, environment):
    """``report(kind)`` for pass, fail, error, interrupted, crashed, refused, blocked or unsupported."""

    def make(kind: str):
        plan, facts = make_plan(), {"environment": environment, "command": COMMAND}
        if kind in ("refused", "unsupported", "blocked"):
            code = {"refused": 2, "unsupported": 4, "blocked": 5}[kind]
            return refused(Refusal(code, "--device cuda: there is none"), RunConfig(), **facts)
        if kind == "interrupted":
            return build(record, plan, [], **facts, interrupted_signal=2, message="SIGINT at step 8")
        if kind == "crashed":
            return build(Record(), plan, [], **facts, crashed=True, message="RuntimeError: out of memory")
        statuses = {"fail": {"coverage": FAIL}, "error": {"determinism": ERROR}}.get(kind, {})
        return build(record, plan, findings(plan, **statuses), **facts)

    return make


ENDS = {
    "pass": ("pass", 0),
    "fail": ("fail", 1),
    "error": ("error", 3),
    "interrupted": ("interrupted", 130),
    "crashed": ("error", 3),
    "refused": ("error", 2),
    "unsupported": ("unsupported", 4),
    "blocked": ("blocked", 5),
}


def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("kind", ENDS)
def test_every_end_of_a_run_keeps_the_contract(report, kind):
    data = json.loads(json_text(report(kind)))
    VALIDATOR.validate(data)
    assert (data["verdict"], data["exit_code"]) == ENDS[kind]
    assert (data["numerics"] is None) == (kind in ("refused", "unsupported", "blocked"))
    assert data["command"] == "python train.py --data.source 'text:a file'"


def objects(value, path=()):
    """Every object of a tree whose keys the schema fixes, with its path."""
    if isinstance(value, list):
        for index, item in enumerate(value[:1]):
            yield from objects(item, (*path, index))
    elif isinstance(value, dict) and path not in (
        ("config",),
        ("environment", "packages"),
        ("environment", "transformer_engine"),
    ):
        yield path
        for key, item in value.items():
            yield from objects(item, (*path, key))


def test_the_schema_refuses_unknown_and_missing_keys_everywhere(report):
    data = json.loads(json_text(report("pass")))
    paths = list(objects(data))
    assert {(), ("summary",), ("environment",), ("plan", 0), ("checks", 0)} <= set(paths)
    for path in paths:
        for spoil in (lambda owner: owner.update(unknown=1), lambda owner: owner.popitem()):
            spoiled = copy.deepcopy(data)
            owner = spoiled
            for key in path:
                owner = owner[key]
            spoil(owner)
            assert not VALIDATOR.is_valid(spoiled), path


@pytest.mark.parametrize(
    ("key", "value"),
    [("verdict", "passed"), ("verdict", "fail"), ("exit_code", 1), ("exit_code", True), ("numerics", None),
     ("schema_version", "2.0"), ("artifacts", ["/etc/x"]), ("command", ["python"])],
)  # fmt: skip
def test_the_schema_refuses_a_wrong_value(report, key, value):
    data = json.loads(json_text(report("pass")))
    assert not VALIDATOR.is_valid(data | {key: value})


def test_the_schema_knows_every_check_of_the_plan():
    assert set(CHECKS) <= set(schema()["$defs"]["check"]["properties"]["name"]["enum"])


def test_numbers_that_are_not_finite_are_null_and_the_hex_tells_which(record, report):
    record.steps[-1] = dataclasses.replace(record.steps[-1], loss=math.nan, loss_hex=math.nan.hex())
    data = json.loads(json_text(report("pass")))
    assert data["summary"]["loss_last"] is None
    VALIDATOR.validate(data)
    line = json.loads(json_line(record.steps[-1]))
    jsonschema.Draft202012Validator(schema()["$defs"]["step"]).validate(line)
    assert (line["loss"], line["loss_hex"]) == (None, "nan")


def test_summary_adds_up_the_steps(record):
    s = summarize(record)
    assert (s.steps, s.tokens, s.loss_first, s.loss_last) == (8, 8 * 1020, 5.5, 4.2)
    assert (s.tokens_per_s, s.step_time_ms_p50, s.step_time_ms_p95) == (2040.0, 500.0, 510.0)
    assert (s.forward_ms_p50, s.backward_ms_p50, s.peak_gib, s.held_mib) == (200.0, 250.0, 0.61, 11.25)


def test_summary_of_nothing_has_no_numbers():
    s = summarize(Record())
    assert (s.steps, s.tokens) == (0, 0)
    assert {s.loss_first, s.loss_last, s.tokens_per_s, s.peak_gib} == {None}


def test_a_required_check_that_nobody_judged_shows_up(record, make_plan, findings, environment):
    plan = make_plan()
    some = [f for f in findings(plan) if f.name != "coverage"]
    report = build(record, plan, some, environment=environment, command=COMMAND)
    assert report.with_status(ERROR) == ["coverage"]
    assert (report.verdict, report.exit_code) == ("error", 3)


def test_checks_that_an_interruption_left_over_are_skipped_not_errors(report):
    interrupted = report("interrupted")
    assert {check.status for check in interrupted.checks} == {SKIP}
    assert {check.detail for check in interrupted.checks} == {"the run was interrupted before it was judged"}


def test_verdict_line_says_how_the_numbers_were_made_and_what_is_red(report):
    line = verdict_line(report("fail"))
    assert line.startswith("FAIL (emulated): mxfp8 with recompute mla_up_proj: coverage failed; ")
    assert line.endswith("; exit code 1")
    assert "--device cuda: there is none" in verdict_line(report("unsupported"))
    assert "native" not in line
