"""report.md: the same tables as on the terminal, for a pull request or an issue (GitHub's dialect).

All values are escaped: a name with a pipe, a backtick or a tag shows as itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from smoke import __version__
from smoke.output import printable
from smoke.report.contract import Report, verdict_line
from smoke.report.matrix import MatrixRow, columns
from smoke.report.text import how, summary_pairs


def escape(text: str) -> str:
    """Text that Markdown shows as it is, also inside a table cell."""
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~#$!])", r"\\\1", text)
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def markdown_text(report: Report) -> str:
    """The report as Markdown."""
    checks = [(c.status, c.name, c.measured, c.limit, c.where, c.detail) for c in report.checks]
    parts = [
        f"# smoke: {escape(report.name)}",
        f"**{escape(verdict_line(report))}**",
        escape(how(report)),
        f"Command: {escape(report.command)}",
        "## Checks",
        _table(("status", "check", "measured", "limit", "where", "detail"), checks) if checks else "No check ran.",
        "## Summary",
        _table(("what", "value"), summary_pairs(report)),
    ]
    if report.plan:
        choices = [(c.choice, c.value, c.reason) for c in report.plan]
        parts += ["## Plan", _table(("choice", "value", "reason"), choices)]
    packages = [("smoke", __version__), *sorted(report.environment["packages"].items())]
    parts += ["## Environment", _table(("package", "version"), packages)]
    return "\n\n".join(parts) + "\n"


def matrix_markdown(rows: Sequence[MatrixRow]) -> str:
    """The table of ``smoke matrix`` as Markdown."""
    titles = [title for title, _ in columns(rows)]
    cells = [values for _, values in columns(rows)]
    return _table(titles, list(zip(*cells, strict=True))) + "\n"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles)]
    body = [[escape(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*lines, *body])
