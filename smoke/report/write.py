"""All files of a run folder, in an order that makes ``report.json`` the sign that the folder is complete.

Each file is replaced as a whole (``smoke.report.files``), ``steps.jsonl`` is there since the first step, and
``report.json`` comes last, so a reader that finds it finds every artifact it names.
"""

from __future__ import annotations

import pathlib
from dataclasses import replace

from smoke.config import RunConfig
from smoke.record import Record, json_line
from smoke.report.config_yaml import config_text
from smoke.report.contract import Report
from smoke.report.files import write_atomic
from smoke.report.folder import BUNDLE
from smoke.report.html import html_text
from smoke.report.json_report import json_text
from smoke.report.junit import junit_text
from smoke.report.markdown import markdown_text

CONFIG = "config.yaml"
STEPS = "steps.jsonl"
"""Name of the file that ``StepWriter`` fills while training goes on."""


def write_config(folder: pathlib.Path, config: RunConfig) -> None:
    """Write config.yaml before the run ends: who resumes a run that was killed takes its options from there."""
    write_atomic(folder / CONFIG, config_text(config))


def write_all(folder: pathlib.Path, report: Report, record: Record, config: RunConfig) -> Report:
    """Write every artifact into the folder and return the report that names them.

    ``steps.jsonl`` is left as the writer of the training left it, and written from the record where there was none.
    Raises OSError when the disk does not take a file; ``report.json`` is then absent.
    """
    if not (folder / STEPS).exists():
        write_atomic(folder / STEPS, "".join(f"{json_line(row)}\n" for row in record.steps))
    texts = {
        CONFIG: config_text(config),
        "report.md": markdown_text(report),
        "report.xml": junit_text(report),
        "report.html": html_text(report, record),
    }
    for name, text in texts.items():
        write_atomic(folder / name, text)
    bundle = (BUNDLE,) if (folder / BUNDLE / "bundle.json").exists() else ()
    report = replace(report, artifacts=("report.json", *sorted((*texts, STEPS)), *bundle))
    write_atomic(folder / "report.json", json_text(report))
    return report
