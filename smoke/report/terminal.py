"""Tables for a person at a terminal, by rich. No colour and no control codes where standard output is no terminal.

Eighty columns are enough: a narrow terminal gets measured value, limit and place below each other in one column, and
the matrix its two first pairs of columns stacked. All text is passed as text, never as rich's markup.
"""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from smoke import __version__
from smoke.checks import Finding
from smoke.output import printable
from smoke.plan import Plan
from smoke.report.contract import Report, verdict_line
from smoke.report.folder import BUNDLE
from smoke.report.matrix import MatrixRow, columns
from smoke.report.selftest import SelftestRow
from smoke.report.text import HOW, summary_pairs

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

WIDE = 120
"""Columns from which tables are laid out flat."""
NARROWEST = 40
"""Columns that are used even where the terminal says it has fewer, or none."""
STYLES = {
    "PASS": "green",
    "FAIL": "bold red",
    "SKIP": "yellow",
    "ERROR": "bold magenta",
    "pass": "green",
    "fail": "bold red",
    "error": "bold magenta",
    "unsupported": "yellow",
    "blocked": "yellow",
    "interrupted": "yellow",
}


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Before the work: what was asked, how the numbers will be made, and each decision with its reason."""
    console = console or _console()
    config = plan.config
    words = f"{config.precision} with recompute {'+'.join(config.recompute) or 'none'}"
    head = f"smoke {__version__}: {words}, layout {config.layout}, {config.steps} steps"
    console.print(_text(console, head, "bold"))
    console.print(_text(console, f"Numerics {plan.numerics}: {HOW[plan.numerics]}."))
    table = _table(console, "choice", "value", "reason")
    table.columns[0].no_wrap = True
    for choice in plan.choices:
        table.add_row(*(_text(console, word) for word in (choice.choice, choice.value, choice.reason)))
    console.print(table)


def show_report(report: Report, folder: pathlib.Path | None = None, console: Console | None = None) -> None:
    """After the work: checks, main numbers, where the files are, and the verdict as the last line."""
    console = console or _console()
    if report.checks:
        console.print(_checks(console, report.checks))
    if report.summary.steps:
        for label, value in summary_pairs(report):
            console.print(_text(console, f"{label}: {value}"), soft_wrap=True)
    if folder is not None and report.artifacts:
        console.print(_text(console, f"report: {folder / 'report.html'} (also {_others(report)})"), soft_wrap=True)
    if folder is not None and BUNDLE in report.artifacts:
        command = shlex.join(["smoke", "replay", str(folder / BUNDLE)])
        console.print(_text(console, f"reproduce: {command}"), soft_wrap=True)
    console.print(_text(console, verdict_line(report), STYLES.get(report.verdict, "")), soft_wrap=True)


def show_matrix(rows: Sequence[MatrixRow], console: Console | None = None) -> None:
    """One row for each combination; red checks stand in the last column, or below the table where it is narrow."""
    console = console or _console()
    found = [(title, [_short_lines(cell) for cell in cells]) for title, cells in columns(rows)]
    if console.width < WIDE:
        found = [_stacked(found[0], found[1]), _stacked(found[2], found[3]), *found[4:-1]]
    table = _table(console, *(title.partition(" (")[0] for title, _ in found))
    for column in table.columns[: 2 if console.width < WIDE else 4]:
        column.no_wrap = True
    for row, cells in zip(rows, zip(*(values for _, values in found), strict=True), strict=True):
        table.add_row(*(_text(console, cell, _cell_style(cell, row)) for cell in cells))
    console.print(table)
    labels = ", ".join(sorted({row.times_of for row in rows if row.times_of}))
    if labels:
        console.print(_text(console, f"step ms are times of: {labels}"))
    if console.width < WIDE:
        for row in rows:
            if row.red:
                line = f"{row.precision} with recompute {row.recompute}: {', '.join(row.red)}"
                console.print(_text(console, line, STYLES.get(row.verdict, "")), soft_wrap=True)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, NARROWEST)
    return console


def _text(console: Console, text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text("\n".join(printable(line, console.encoding) for line in text.split("\n")), style=style)


def _table(console: Console, *titles: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for title in titles:
        table.add_column(title, overflow="fold", vertical="top")
    return table


def _checks(console: Console, checks: Sequence[Finding]) -> Table:
    wide = console.width >= WIDE
    table = _table(
        console, "status", "check", *(("measured", "limit", "where") if wide else ("measured, limit, where",))
    )
    for column in table.columns[:2]:
        column.no_wrap = True
    for check in checks:
        place = "\n".join(part for part in (check.where, check.detail) if part)
        cells = (check.measured, check.limit, place) if wide else (_in_one(check),)
        status = _text(console, check.status, STYLES.get(check.status, ""))
        table.add_row(status, _text(console, check.name), *(_text(console, cell) for cell in cells))
    return table


def _in_one(check: Finding) -> str:
    limit = f"limit: {check.limit}" if check.limit else ""
    where = f"where: {check.where}" if check.where else ""
    return "\n".join(part for part in (check.measured, limit, where, check.detail) if part)


def _others(report: Report) -> str:
    return ", ".join(name for name in report.artifacts if name not in ("report.html", BUNDLE))


def _short_lines(cell: str, width: int = 24) -> str:
    """A long recompute set, one region to a line."""
    return cell if len(cell) <= width else cell.replace("+", "+\n")


def _stacked(upper: tuple[str, list[str]], lower: tuple[str, list[str]]) -> tuple[str, list[str]]:
    cells = [f"{a}\n{b}" for a, b in zip(upper[1], lower[1], strict=True)]
    return f"{upper[0]}\n{lower[0]}", cells


def _cell_style(cell: str, row: MatrixRow) -> str:
    return STYLES.get(row.verdict, "") if cell.split("\n")[-1] == row.verdict else ""


def show_selftest(rows: Sequence[SelftestRow], line: str, verdict: str, console: Console | None = None) -> None:
    """One row for each run of ``smoke selftest``, and the verdict as the last line."""
    console = console or _console()
    table = _table(console, "status", "row", "fault", "red checks", "where, what is wrong")
    for column in table.columns[:2]:
        column.no_wrap = True
    for row in rows:
        told = "\n".join(part for part in (row.where, row.detail) if part)
        cells = (str(row.row or "-"), row.fault or f"none: {row.config}", ", ".join(row.red) or "-", told)
        style = STYLES.get(row.status, "")
        table.add_row(_text(console, row.status, style), *(_text(console, cell) for cell in cells))
    console.print(table)
    console.print(_text(console, line, STYLES.get(verdict, "")), soft_wrap=True)
