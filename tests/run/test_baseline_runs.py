"""``--baseline`` from end to end in small runs: recorded, repeated, of another key, required, unusable, skipped."""

from __future__ import annotations

import pytest
from small_runs import finding, small_config, statuses

from smoke import cli
from smoke.environment import detect
from smoke.plan import Refusal, resolve

BF16 = {"precision": "bf16", "recompute": ()}


def test_round_trip_of_a_run(run, tmp_path):
    file = str(tmp_path / "b.json")
    first = run("first", **BF16, baseline=file)
    assert (finding(first, "baseline")["status"], first["exit_code"]) == ("SKIP", 0)
    assert "does not exist" in finding(first, "baseline")["detail"]
    assert cli.main(["baseline", "update", str(tmp_path / "first"), "--baseline", file, "--reason", "r"]) == 0

    again = run("again", **BF16, baseline=file, require_baseline=True)
    assert finding(again, "baseline")["measured"].startswith("0 of 4 losses differ")
    assert (again["exit_code"], again["baseline"]["key"]) == (0, first["baseline"]["key"])

    other = run("other", **BF16, baseline=file, require_baseline=True, seed=7)
    assert (finding(other, "baseline")["status"], other["exit_code"], other["verdict"]) == ("SKIP", 6, "unsupported")
    assert "seed default recorded, 7 here" in finding(other, "baseline")["detail"]
    assert other["baseline"]["key"]["data"] != first["baseline"]["key"]["data"]


def test_without_a_baseline_it_is_skipped_and_not_required():
    plan = resolve(small_config(**BF16), detect())
    assert "baseline" not in plan.required
    assert "no --baseline FILE" in plan.skipped["baseline"]


def test_a_file_that_cannot_be_used_ends_the_run_before_it_begins(run, tmp_path):
    (tmp_path / "b.json").write_text("<<<<<<< ours\n", encoding="utf-8")
    report = run(**BF16, baseline=str(tmp_path / "b.json"))
    assert (report["exit_code"], report["summary"]["steps"]) == (2, 0)
    assert "is not JSON" in report["message"]


def test_require_baseline_needs_a_file():
    with pytest.raises(Refusal, match="name the file that is required"):
        resolve(small_config(require_baseline=True), detect())


def test_a_skipped_baseline_is_a_skipped_check(run, tmp_path):
    from smoke.config import CheckConfig

    skip = ("baseline", "determinism", "rope_contract", "absorbed_parity")
    report = run(**BF16, baseline=str(tmp_path / "b.json"), check=CheckConfig(skip=skip), steps=1)
    assert (statuses(report)["baseline"], report["exit_code"]) == ("SKIP", 4)
