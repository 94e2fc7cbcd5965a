"""A finished run as it stands in its folder: what a baseline is made of, or compared with.

Only ``report.json`` (which comes last, so the folder is complete) and ``steps.jsonl`` are read, as data from elsewhere:
what is not as a run leaves it is a ``BaselineError`` of one line.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smoke.baseline.file import MOST_BYTES, BaselineError, is_cost, json_of, json_text
from smoke.baseline.key import FIELDS, options_of
from smoke.checks import FAIL, PASS, SKIP
from smoke.record import RunMark, StepRow

BASELINE = "baseline"
"""The one check that is relative to another run."""


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """One run folder."""

    folder: pathlib.Path
    mark: RunMark
    options: Mapping[str, str]
    steps: tuple[StepRow, ...]
    red: tuple[str, ...]
    """Why it is no ground to stand on: absolute checks that are not green, steps that are not there."""


def finished(folder: str) -> FinishedRun:
    """Read a run folder. Raises BaselineError."""
    path, name = pathlib.Path(folder), f"{folder}"
    if not path.is_dir():
        raise BaselineError(f"{name}: is no folder of a run")
    report = json_of(path / "report.json", f"{name}/report.json")
    if not isinstance(report, dict) or not isinstance(report.get("config"), dict):
        raise BaselineError(f"{name}/report.json: is no report of a run")
    mark, checks = report.get("baseline"), report.get("checks")
    if not isinstance(mark, dict) or not _is_key(mark.get("key")) or not is_cost(mark.get("costs")):
        raise BaselineError(f"{name}/report.json: tells no key for a baseline (no step was trained, or it is older)")
    steps = _steps(path / "steps.jsonl", f"{name}/steps.jsonl")
    return FinishedRun(
        folder=path,
        mark=RunMark(key=mark["key"], costs=mark["costs"]),
        options=options_of(report["config"]),
        steps=steps,
        red=tuple(_red(report, checks, steps)),
    )


def _is_key(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == set(FIELDS) and all(isinstance(v, str) for v in value.values())


def _red(report: Mapping[str, Any], checks: Any, steps: Sequence[StepRow]) -> list[str]:
    if not isinstance(checks, list) or not all(isinstance(check, dict) for check in checks):
        return ["its report holds no list of checks"]
    absolute = [check for check in checks if check.get("name") != BASELINE]
    found = []
    if report.get("verdict") not in ("pass", "fail", "unsupported") or report.get("message"):
        found.append(f"its verdict is {report.get('verdict')}")
    if not any(check.get("status") == PASS for check in absolute):
        found.append("no check passed")
    for check in absolute:
        skipped_by_user = check.get("status") == SKIP and check.get("detail") == "--check.skip"
        if check.get("status") not in (PASS, SKIP) or skipped_by_user:
            found.append(f"{check.get('name')} is {check.get('status')}")
    if report.get("verdict") == "fail" and not found and not _failed(checks, BASELINE):
        found.append("its verdict is fail")
    if [row.step for row in steps] != list(range(int(report["config"].get("steps") or 0))):
        found.append("a step is missing")
    found += [f"the loss of step {row.step} is {row.loss_hex}" for row in steps if not math.isfinite(row.loss)]
    return found


def _failed(checks: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(check.get("name") == name and check.get("status") == FAIL for check in checks)


def _steps(path: pathlib.Path, name: str) -> tuple[StepRow, ...]:
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise BaselineError(f"{name}: is no file of steps")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BaselineError(f"{name}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BaselineError(f"{name}: is not UTF-8 text") from None
    return tuple(_step(json_text(line, f"{name}: line {number}"), f"{name}: line {number}")
                 for number, line in enumerate(lines, 1))  # fmt: skip


def _step(row: Any, name: str) -> StepRow:
    fields = {field.name for field in dataclasses.fields(StepRow)}
    if not isinstance(row, dict) or not fields <= set(row) or not isinstance(row["step"], int):
        raise BaselineError(f"{name}: is no step")
    try:
        loss = float.fromhex(row["loss_hex"])
    except (ValueError, TypeError, OverflowError):
        raise BaselineError(f"{name}: loss_hex {row['loss_hex']!r} is no number") from None
    return StepRow(**{**{field: row[field] for field in fields}, "loss": loss, "loss_hex": loss.hex()})
