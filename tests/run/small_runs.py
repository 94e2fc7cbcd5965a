"""A very small configuration, and how tests read the report of its run."""

from __future__ import annotations

import pathlib
from typing import Any

from smoke.environment import detect
from smoke.faults import SMALL, small_config
from smoke.plan import resolve
from smoke.report.config_yaml import config_text

__all__ = ["ROOT", "SMALL", "finding", "red", "small_config", "small_session", "statuses", "yaml_of"]

ROOT = pathlib.Path(__file__).resolve().parents[2]


def statuses(report: dict[str, Any]) -> dict[str, str]:
    """Status of each check."""
    return {check["name"]: check["status"] for check in report["checks"]}


def red(report: dict[str, Any]) -> set[str]:
    """Names of the checks that are not PASS and not SKIP."""
    return {name for name, status in statuses(report).items() if status in ("FAIL", "ERROR")}


def finding(report: dict[str, Any], name: str) -> dict[str, Any]:
    """One check."""
    return next(check for check in report["checks"] if check["name"] == name)


def small_session(**changes: Any) -> Any:
    """What ``execute`` builds from the small configuration: data, model, swapped leaves, twin."""
    from smoke.run.session import build, load_data

    plan = resolve(small_config(**changes), detect())
    return build(plan, *load_data(plan))


def yaml_of(file: pathlib.Path, **changes: Any) -> pathlib.Path:
    """The small configuration as a YAML file, for a run in a process of its own."""
    file.write_text(config_text(small_config(**changes)), encoding="utf-8")
    return file
