"""report.html: one file with tables and figures that opens without a network.

plotly.js is part of the file (about 4.8 MB), so it can be mailed or kept as a build artifact; a report without figures
leaves it out. Names and messages are hostile until escaped: in the markup by ``html.escape``, in the figures' JSON by
writing every ``<`` as ``\\u003c``, so that no text ends the script element. Should that ever fail, the page's own
policy lets the browser run no script but the two whose hashes it names, and load nothing. Tables scroll sideways on a
narrow screen.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence

from smoke import __version__
from smoke.checks import ERROR, FAIL, PASS, SKIP
from smoke.output import printable
from smoke.record import CoverageRow, Record
from smoke.report.config_yaml import text_of
from smoke.report.contract import Report, verdict_line
from smoke.report.plots import Figure, figures
from smoke.report.text import how, summary_pairs

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f27; background: #fff; margin: 0 auto;
  padding: 1rem; max-width: 76rem; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p, pre { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; background: #f4f5f7; padding: .75rem; }
.verdict { padding: .75rem 1rem; border-left: .4rem solid #8a6d00; background: #fdf6dd; font-weight: 600; }
.verdict.pass { border-color: #1a7f37; background: #e8f5ec; }
.verdict.fail, .verdict.error { border-color: #b42318; background: #fdecea; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid #e3e6eb; }
td { min-width: 7rem; max-width: 26rem; overflow-wrap: anywhere; }
td.name { min-width: 0; overflow-wrap: normal; white-space: nowrap; }
.PASS { color: #1a7f37; } .FAIL, .ERROR { color: #b42318; } .SKIP { color: #8a6d00; }
.PASS, .FAIL, .ERROR, .SKIP { font-weight: 600; }
.plot { min-width: 18rem; } #gradients { min-width: 44rem; }
summary { cursor: pointer; margin: .75rem 0; }
@media (max-width: 46rem) {
  thead, td:empty { display: none; }
  table, tbody, tr, td, td.name { display: block; white-space: normal; max-width: none; border: 0; padding: 0; }
  tr { padding: .5rem 0; border-bottom: 1px solid #e3e6eb; }
  td::before { content: attr(data-title) ": "; color: #5b6472; font-weight: 400; }
  td.name { font-weight: 600; } td.name::before { content: none; }
}
"""
SCRIPT = """
for (const [id, figure] of Object.entries(JSON.parse(document.getElementById("figures").textContent))) {
  Plotly.newPlot(id, figure.data, figure.layout, {responsive: true, displaylogo: false});
}
"""
PLOTS = {
    "loss": ("Loss", "Over the run's batches, in nats per token. The perturbed twins show what noise alone does."),
    "gap": ("Distance to the BF16 twin", "Absolute difference of the losses at each step. Equal losses leave a gap."),
    "gradients": (
        "Gradient error by layer and parameter",
        "Largest relative error against the BF16 twin, over compared steps, slices and experts, with routing replayed.",
    ),
}
"""Heading and caption of each figure."""
NAMES = ("status", "check", "what", "choice", "module")
"""Titles of the columns that name a row."""


def html_text(report: Report, record: Record) -> str:
    """The page as HTML text."""
    shown = figures(record)
    scripts = _scripts(shown)
    body = [
        f"<h1>{_safe(report.name)}</h1>",
        f'<p class="verdict {_safe(report.verdict)}">{_safe(verdict_line(report))}</p>',
        f"<p>{_safe(how(report))}</p>",
        *_section("Checks", _checks(report)),
        *_section("Summary", _table(("what", "value"), summary_pairs(report)) if report.summary.steps else ""),
        *(_plot(name) for name in shown),
        *_section("Plan", _table(("choice", "value", "reason"), [(c.choice, c.value, c.reason) for c in report.plan])),
        *_section("Coverage", _coverage(record)),
        *_section("How to repeat it", _repeat(report)),
        _figures(shown, scripts),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{_safe(report.verdict)}: {_safe(report.name)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _safe(text: str) -> str:
    return html.escape(printable(text))


def _section(title: str, content: str) -> list[str]:
    return [f"<h2>{title}</h2>", content] if content else []


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; on a narrow screen each row becomes a block of lines, a title before each value. Names do not wrap."""
    if not rows:
        return ""
    head = "".join(f"<th>{_safe(title)}</th>" for title in titles)
    body = "\n".join(f"<tr>{''.join(map(_cell, titles, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _cell(title: str, value: str) -> str:
    status = f" {value}" if value in (PASS, FAIL, SKIP, ERROR) else ""
    kind = f' class="name{status}"' if title in NAMES else ""
    text = re.sub(r"(?<=\w\.)(?=[a-z])", "<wbr>", _safe(value))
    return f'<td{kind} data-title="{title}">{text}</td>'


def _checks(report: Report) -> str:
    rows = [(c.status, c.name, c.measured, c.limit, c.where, c.detail) for c in report.checks]
    return _table(("status", "check", "measured", "limit", "where", "detail"), rows)


def _plot(name: str) -> str:
    title, caption = PLOTS[name]
    return f'<h2>{title}</h2>\n<p>{caption}</p>\n<div class="scroll"><div class="plot" id="{name}"></div></div>'


def _coverage(record: Record) -> str:
    rows = [
        (r.module, r.gemm, r.format, str(r.quantized_calls), str(r.bf16_calls), _replays(r), r.reason)
        for r in record.coverage
    ]
    table = _table(("module", "GEMM", "format", "quantized calls", "BF16 calls", "replayed", "reason"), rows)
    return f"<details><summary>{len(rows)} GEMMs, with what each ran in</summary>{table}</details>" if rows else ""


def _replays(row: CoverageRow) -> str:
    return f"{row.replay_quantized_calls} quantized, {row.replay_bf16_calls} BF16"


def _repeat(report: Report) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in sorted(report.environment["packages"].items()))
    machine = f"{report.environment['platform']}, Python {report.environment['python']}"
    return (
        f"<pre>{_safe(report.command)}</pre>\n<p>smoke {__version__}; {_safe(machine)}; {_safe(packages)}</p>\n"
        f"<details><summary>All options</summary><pre>{html.escape(text_of(report.config))}</pre></details>"
    )


def _scripts(shown: dict[str, Figure]) -> list[str]:
    """What the page runs: plotly.js, and the lines that draw the figures."""
    if not shown:
        return []
    from plotly.offline import get_plotlyjs

    return [get_plotlyjs(), SCRIPT]


def _figures(shown: dict[str, Figure], scripts: Sequence[str]) -> str:
    if not scripts:
        return ""
    library, draw = scripts
    data = json.dumps(shown, allow_nan=False).replace("<", "\\u003c")
    return (
        "<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>\n"
        f"<script>{library}</script>\n"
        f'<script type="application/json" id="figures">{data}</script>\n<script>{draw}</script>'
    )


def _policy(scripts: Sequence[str]) -> str:
    """Content security policy: these scripts by their hashes, styles of the page, images made in it, nothing else."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests) or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
