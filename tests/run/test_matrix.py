"""``execute_matrix``: rows share the twin's curves, a failing or crashing row stops no other, the worst code counts."""

from __future__ import annotations

import json
import os
import signal

import pytest
from small_runs import small_config

import smoke.run
import smoke.run.twin
from smoke.environment import detect
from smoke.plan import Refusal, resolve
from smoke.precision.plugin import EmulatedPrecision
from smoke.run import execute_matrix, measure

COMBINATIONS = [("bf16", ()), ("mxfp8", ()), ("mxfp8", ("mla_up_proj",))]


@pytest.fixture
def matrix(tmp_path, monkeypatch):
    """``matrix(combinations)`` runs them and returns the exit code and each row's report.json by folder."""

    monkeypatch.setenv("COLUMNS", "200")  # rich then prints a line for each row

    def execute_small(combinations=COMBINATIONS, **changes):
        environment, out = detect(), tmp_path / "matrix"
        configs = [small_config(precision=p, recompute=r, out=str(out), **changes) for p, r in combinations]
        code = execute_matrix([resolve(c, environment) for c in configs], environment, ["smoke", "matrix"])
        return code, {file.parent.name: json.loads(file.read_text()) for file in sorted(out.glob("*/report.json"))}

    return execute_small


def _table_lines(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.lstrip(" │|").startswith(("bf16", "mxfp8"))]


def test_rows_share_the_twin_and_have_a_folder_each(matrix, monkeypatch, capsys):
    calls, original = [], smoke.run.twin.twin_curves

    def counted(plan, batches):
        calls.append(plan.config.precision)
        return original(plan, batches)

    monkeypatch.setattr(smoke.run.twin, "twin_curves", counted)
    code, reports = matrix(steps=10)
    assert calls == ["bf16"]
    assert set(reports) == {"bf16-none", "mxfp8-none", "mxfp8-mla_up_proj"}
    assert code == max(report["exit_code"] for report in reports.values()) == 0
    printed = capsys.readouterr().out
    assert [f"[{n}/3] {name}" in printed for n, name in enumerate(("bf16-none", "mxfp8-none"), 1)] == [True, True]
    assert len(_table_lines(printed)) == 3
    assert all("loss_tracking" not in line for line in _table_lines(printed))


def test_the_bf16_row_of_a_matrix_is_its_own_twin(matrix):
    """What is shared is the right thing: the losses of the bf16 row are the twin's, so their distance is zero."""
    _, reports = matrix([("mxfp8", ()), ("bf16", ())], steps=10)
    tracking = next(check for check in reports["bf16-none"]["checks"] if check["name"] == "loss_tracking")
    assert tracking["status"] == "PASS"
    assert reports["bf16-none"]["summary"]["loss_last"] != reports["mxfp8-none"]["summary"]["loss_last"]


def test_a_red_row_stops_no_other_and_gives_the_exit_code(matrix, monkeypatch, capsys):
    convert = EmulatedPrecision._convert

    def only_with_recompute(plugin, name, leaf, slot):
        return convert(plugin, name, leaf, slot) if plugin.runtime.keeps_input.__self__.regions else leaf

    monkeypatch.setattr(EmulatedPrecision, "_convert", only_with_recompute)
    code, reports = matrix([("mxfp8", ()), ("mxfp8", ("mla_up_proj",)), ("bf16", ())])
    assert {name: report["exit_code"] for name, report in reports.items()} == {
        "mxfp8-none": 1,
        "mxfp8-mla_up_proj": 0,
        "bf16-none": 0,
    }
    assert code == 1
    red_line, *others = _table_lines(capsys.readouterr().out)
    assert "fail" in red_line.lower()
    assert not any("fail" in line.lower() for line in others)


def test_folders_are_all_made_before_the_first_row_and_unused_ones_removed(matrix, tmp_path, capsys):
    taken = tmp_path / "matrix" / "mxfp8-none" / "file"
    taken.parent.mkdir(parents=True)
    taken.write_text("mine")
    code, reports = matrix()
    assert (code, reports) == (2, {})
    assert "mxfp8-none: is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "matrix").iterdir()] == ["mxfp8-none"]


def test_rows_that_ran_are_shown_when_a_later_one_is_refused(matrix, monkeypatch, capsys):
    run_into = smoke.run.run_into

    def no_disk_left(folder, plan, *args, **kwargs):
        if plan.config.precision == "mxfp8":
            raise Refusal(2, "--out: cannot be written")
        return run_into(folder, plan, *args, **kwargs)

    monkeypatch.setattr(smoke.run, "run_into", no_disk_left)
    code, reports = matrix()
    printed = capsys.readouterr()
    assert (code, set(reports)) == (2, {"bf16-none"})
    assert len(_table_lines(printed.out)) == 1
    assert "cannot be written" in printed.err


def test_a_crash_stops_no_other_row_and_is_the_worst(matrix, monkeypatch, capsys):
    parity = measure.parity

    def crash(session):
        if session.plan.config.precision == "bf16":
            raise RuntimeError("boom")
        return parity(session)

    monkeypatch.setattr(measure, "parity", crash)
    code, reports = matrix()
    assert {name: report["exit_code"] for name, report in reports.items()} == {
        "bf16-none": 3,
        "mxfp8-mla_up_proj": 0,
        "mxfp8-none": 0,
    }
    assert code == 3
    assert "RuntimeError: boom" in reports["bf16-none"]["message"]
    assert "boom" in capsys.readouterr().err


def test_an_interrupt_ends_the_matrix(matrix, monkeypatch):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    parity = measure.parity

    def interrupted(session):
        if session.plan.config.recompute:
            os.kill(os.getpid(), signal.SIGTERM)
        return parity(session)

    monkeypatch.setattr(measure, "parity", interrupted)
    code, reports = matrix([("bf16", ()), ("bf16", ("mlp",)), ("mxfp8", ())])
    assert {name: report["verdict"] for name, report in reports.items()} == {
        "bf16-none": "pass",
        "bf16-mlp": "interrupted",
    }
    assert code == 143
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
