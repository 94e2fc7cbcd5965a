"""report.json and its schema (JSON Schema, draft 2020-12), which tests validate every kind of report against."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

from smoke.record import plain
from smoke.report.contract import Report


def json_text(report: Report) -> str:
    """The report as JSON text. Numbers that are not finite become null; unpaired surrogates stay escaped."""
    return json.dumps(plain(report), indent=1, allow_nan=False) + "\n"


def schema() -> dict[str, Any]:
    """The schema of ``report.json``; a line of ``steps.jsonl`` is its ``$defs/step``."""
    text = importlib.resources.files("smoke.report").joinpath("report.schema.json").read_text(encoding="utf-8")
    return json.loads(text)
