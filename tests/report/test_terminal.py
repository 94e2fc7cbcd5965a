"""Tables at the terminal: readable at 80 columns, plain text where there is no terminal."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from smoke.checks import FAIL
from smoke.plan import Choice
from smoke.report import build, matrix_markdown, matrix_row, show_matrix, show_plan, show_report


@pytest.fixture
def shown():
    """``shown(function, *args, width=80)``: the text that a console of that width gets."""

    def show(function, *args, width: int = 80, encoding: str = "utf-8", **options) -> str:
        raw = io.BytesIO()
        with io.TextIOWrapper(raw, encoding=encoding, write_through=True) as file:
            function(*args, console=Console(file=file, width=width, highlight=False, **options))
            return raw.getvalue().decode(encoding)

    return show


@pytest.fixture
def report(record, make_plan, findings, environment):
    def make(statuses=None, **options):
        plan = make_plan(**options)
        return build(
            record, plan, findings(plan, **(statuses or {})), environment=environment, command=["smoke", "run"]
        )

    return make


def test_plan_says_what_was_asked_and_how_numbers_are_made(shown, make_plan):
    text = shown(show_plan, make_plan())
    assert "mxfp8 with recompute mla_up_proj, layout sbhd, 8 steps" in text
    assert "Numerics emulated: quantized and dequantized by this project" in text
    for choice in make_plan().choices:
        assert choice.choice in text


@pytest.mark.parametrize("width", [80, 119, 120, 200])
def test_tables_fit_and_lose_nothing(shown, report, width):
    made = report({"coverage": FAIL})
    text = shown(show_report, made, width=width)
    table = text[: text.index("steps: ")]
    assert max(map(len, table.splitlines())) <= width
    joined = "".join(table.split())
    for check in made.checks:
        for value in (check.name, check.status, check.measured, check.limit):
            assert "".join(value.split()) in joined or width >= 120
        assert check.name in table
    assert "linear_q_up_proj.weight,head3,step0" in joined or width >= 120


def test_verdict_is_the_last_line_and_times_are_labelled(shown, report):
    text = shown(show_report, report({"coverage": FAIL}))
    assert text.splitlines()[-1].startswith("FAIL (emulated): mxfp8 with recompute mla_up_proj: coverage failed;")
    assert "step time (emulation): 500.0 ms p50" in text
    assert "throughput (emulation): 2,040 tokens/s" in text


def test_times_of_a_bf16_run_are_not_called_emulation(shown, report):
    text = shown(show_report, report(precision="bf16"))
    assert "step time (bf16)" in text
    assert "emulation" not in text


def test_files_are_named(shown, report, tmp_path):
    made = dataclasses.replace(report(), artifacts=("report.json", "report.html"))
    assert f"report: {tmp_path / 'report.html'} (also report.json)" in shown(show_report, made, tmp_path)


def test_no_control_codes_without_a_terminal(shown, report, make_plan):
    assert "\x1b" not in shown(show_report, report({"coverage": FAIL}))
    assert "\x1b" not in shown(show_plan, make_plan())
    assert "\x1b[" in shown(show_report, report(), force_terminal=True, color_system="standard")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_hostile_text_is_shown_not_obeyed(shown, report, make_plan, encoding):
    bad = "[bold]x[/bold] \x1b[2J \udcff \u4e2d"
    checks = tuple(dataclasses.replace(check, where=bad) for check in report().checks)
    text = shown(show_report, dataclasses.replace(report(), checks=checks, message=bad), encoding=encoding)
    assert "[bold]x[/bold] \\x1b[2J \\udcff" in text
    assert "\x1b" not in text
    plan = dataclasses.replace(make_plan(), choices=(Choice("device", bad, bad),))
    assert "[bold]x" in shown(show_plan, plan, encoding=encoding)


@pytest.fixture
def rows(report, record):
    red = report({"gradient_parity": FAIL, "coverage": FAIL}, precision="fp8-tensorwise")
    return [
        matrix_row(report(precision="bf16", recompute=()), record),
        matrix_row(report(), record),
        matrix_row(red, record),
    ]


def test_matrix_row_holds_what_was_measured(rows):
    row = rows[2]
    assert (row.precision, row.recompute, row.numerics, row.verdict) == (
        "fp8-tensorwise",
        "mla_up_proj",
        "emulated",
        "fail",
    )
    assert (row.loss_last, row.held_mib, row.step_ms, row.gradient_error) == (4.2, 11.25, 500.0, 0.08)
    assert row.loss_gap == pytest.approx(0.06)
    assert row.red == ("coverage", "gradient_parity")


@pytest.mark.parametrize("width", [80, 120])
def test_matrix_has_a_row_for_each_combination(shown, rows, width):
    text = shown(show_matrix, rows, width=width)
    assert max(map(len, text.splitlines())) <= width
    for word in (
        "bf16",
        "mxfp8",
        "fp8-tensorwise",
        "mla_up_proj",
        "none",
        "emulated",
        "4.2000",
        "0.06",
        "0.08",
        "11.25",
    ):
        assert word in text
    joined = "".join(text.split())
    assert "coverage,gradient_parity" in joined
    assert "step ms are times of: bf16, emulation" in text


def test_matrix_as_markdown(rows):
    lines = matrix_markdown(rows).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("| precision | recompute | numerics | verdict | final loss | loss gap |")
    assert lines[4].endswith("| coverage, gradient_parity |")


def test_a_combination_that_measured_nothing_has_no_numbers(make_plan, environment, shown):
    from smoke.record import Record

    empty = build(Record(), make_plan(), [], environment=environment, command=["smoke"], crashed=True)
    row = matrix_row(empty, Record())
    assert (row.loss_last, row.loss_gap, row.gradient_error, row.held_mib, row.step_ms) == (None,) * 5
    assert "error" in shown(show_matrix, [row])
