"""report.xml for CI systems: one test case for each check, by junitparser.

FAIL becomes a failure, ERROR an error, SKIP skipped, each with measured value, limit and place in its text. A run that
was refused, interrupted or crashed gets one more case, ``run``, because CI systems take an empty suite for a good one.
"""

from __future__ import annotations

import io
from typing import Any

from smoke.checks import ERROR, FAIL, PASS, SKIP, Finding
from smoke.output import printable
from smoke.report.contract import Report, verdict_line


def junit_text(report: Report) -> str:
    """The report as JUnit XML text."""
    from junitparser import JUnitXml, TestCase, TestSuite

    owner = printable(f"smoke.{report.config['precision']}.{'+'.join(report.config['recompute']) or 'none'}")
    suite = TestSuite("smoke")
    suite.add_property("numerics", report.numerics or "none")
    suite.add_property("verdict", printable(verdict_line(report)))
    for check in report.checks:
        case = TestCase(printable(check.name), classname=owner)
        case.result = _results(check.status, _reason(check), _lines(check))
        suite.add_testcase(case)
    status = _run_status(report)
    if status:
        case = TestCase("run", classname=owner)
        case.result = _results(status, report.message or report.verdict, printable(verdict_line(report)))
        suite.add_testcase(case)
    xml = JUnitXml("smoke")
    xml.add_testsuite(suite)
    buffer = io.BytesIO()
    xml.write(buffer, pretty=True)
    return buffer.getvalue().decode("utf-8")


def _run_status(report: Report) -> str:
    """Status of the whole run where the checks do not tell it; empty where they do."""
    told = {0: PASS, 1: FAIL, 3: ERROR, 4: SKIP}.get(report.exit_code)
    if told in {check.status for check in report.checks}:
        return ""
    if report.verdict in ("unsupported", "blocked"):
        return SKIP
    return ERROR


def _results(status: str, message: str, text: str) -> list[Any]:
    from junitparser import Error, Failure, Skipped

    kinds = {FAIL: Failure, ERROR: Error, SKIP: Skipped}
    if status not in kinds:
        return []
    result = kinds[status](printable(message), status)
    result.text = text
    return [result]


def _reason(check: Finding) -> str:
    return check.detail or check.measured or check.status


def _lines(check: Finding) -> str:
    parts = (("measured", check.measured), ("limit", check.limit), ("where", check.where), ("detail", check.detail))
    return "\n".join(f"{name}: {printable(value)}" for name, value in parts if value)
