"""The default configuration from end to end: the twelve recipe and layout runs, and the whole matrix."""

from __future__ import annotations

import json
import time

import pytest
from small_runs import statuses

from smoke import cli
from smoke.config import LAYOUTS, PRECISIONS
from smoke.requirements import CHECKS

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_default_runs(precision, layout, tmp_path):
    out = tmp_path / "out"
    words = ["--precision", precision, "--recompute", "mla_up_proj", "--layout", layout, "--out", str(out)]
    code = cli.main(["run", *words])
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert (report["verdict"], report["exit_code"], code) == ("pass", 0, 0), report["checks"]
    skipped = {"baseline"} | ({"packed_parity"} if layout == "sbhd" else set())
    skipped |= {"quantizer", "quantization_engaged", "weight_freshness"} if precision == "bf16" else set()
    assert {name for name, status in statuses(report).items() if status == "PASS"} == set(CHECKS) - skipped
    assert len((out / "steps.jsonl").read_text(encoding="utf-8").splitlines()) == 20


@pytest.mark.timeout(1800)
def test_the_whole_matrix(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")  # rich then prints a line for each row
    code = cli.main(["matrix", "--out", str(tmp_path / "matrix")])
    files = (tmp_path / "matrix").glob("*/report.json")
    reports = {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    assert set(reports) == {f"{p}-{r}" for p in PRECISIONS for r in ("none", "mla_up_proj")}
    assert {name: report["verdict"] for name, report in reports.items()} == dict.fromkeys(reports, "pass")
    assert code == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith(PRECISIONS)]
    assert len(lines) == 12
    assert all("pass" in line for line in lines)


@pytest.mark.timeout(600)
def test_every_fault_is_shown(tmp_path):
    start = time.perf_counter()
    assert cli.main(["selftest", "--out", str(tmp_path / "out")]) == 0
    assert time.perf_counter() - start <= 240
    rows = json.loads((tmp_path / "out" / "selftest.json").read_text(encoding="utf-8"))["rows"]
    assert {row["status"] for row in rows} <= {"PASS", "SKIP"}
    assert sum(row["status"] == "PASS" and bool(row["fault"]) for row in rows) >= 32
