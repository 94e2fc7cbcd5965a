"""A disk that fills up: one line, a non-zero exit code, and nothing lost that was written or found out."""

from __future__ import annotations

import errno
import json
import os

import pytest
from small_runs import small_config

import smoke.report.files
import smoke.report.write
from smoke.config import CheckConfig
from smoke.environment import detect
from smoke.plan import resolve
from smoke.requirements import CHECKS
from smoke.run import execute, execute_matrix

KEPT = ("preflight", "finite")
SKIPPED = tuple(name for name in CHECKS if name not in KEPT)


@pytest.fixture
def plan(tmp_path):
    config = small_config(
        out=str(tmp_path / "out"), steps=3, check=CheckConfig(skip=SKIPPED), recompute=(), precision="bf16"
    )
    return resolve(config, detect())


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def lines(folder):
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_when_the_report_does_not_fit_what_was_found_is_still_shown(plan, tmp_path, monkeypatch, capsys):
    write = smoke.report.write.write_atomic
    monkeypatch.setattr(
        smoke.report.write, "write_atomic", lambda path, text: no_space() if "html" in path.name else write(path, text)
    )
    code = execute(plan, detect(), ["smoke", "run"])
    printed = capsys.readouterr()
    assert code == 4
    assert printed.err == f"smoke: --out {tmp_path / 'out'}: cannot be written: No space left on device\n"
    assert " PASS " in printed.out
    assert "2 of " in printed.out.splitlines()[-1]
    assert printed.out.splitlines()[-1].endswith("exit code 4")
    assert len(lines(tmp_path / "out")) == 3
    assert "PASS | finite" in (tmp_path / "out" / "report.md").read_text()
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_step_that_does_not_fit_ends_the_run_in_one_line(plan, tmp_path, monkeypatch, capsys):
    call = smoke.report.files.StepWriter.__call__
    monkeypatch.setattr(
        smoke.report.files.StepWriter, "__call__", lambda self, row: no_space() if row.step == 2 else call(self, row)
    )
    code = execute(plan, detect(), ["smoke", "run"])
    printed = capsys.readouterr()
    assert code == 4
    assert printed.err == f"smoke: --out {tmp_path / 'out'}: cannot be written: No space left on device\n"
    assert [row["step"] for row in lines(tmp_path / "out")] == [0, 1]


def test_a_row_of_a_matrix_that_does_not_fit_is_a_row(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smoke.report.write, "write_atomic", no_space)
    code = execute_matrix([plan], detect(), ["smoke", "matrix"])
    printed = capsys.readouterr()
    assert code == 4
    assert "cannot be written: No space left on device" in printed.err
    assert "unsupported" in printed.out
