"""What a run says of itself: the versioned contract behind every file of the run folder.

``build`` makes a ``Report`` of a run, however it ended; ``refused`` of a request that the plan refused. The fields are
those of ``report.json``, in its order, and ``report.schema.json`` is their definition; a change that would break a
reader raises ``SCHEMA_VERSION``. Numbers stay floats here, finite or not; JSON writes null for those that are not.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smoke.checks import ERROR, FAIL, PASS, SKIP, Finding
from smoke.checks.training import LABELS
from smoke.config import RunConfig
from smoke.environment import Environment
from smoke.plan import Choice, Plan, Refusal
from smoke.record import Record, RunMark, plain
from smoke.report.exit_code import verdict_and_exit

SCHEMA_VERSION = "1.0"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Main numbers of a run; None where nothing was measured. Times are of the steps after warm-up."""

    steps: int = 0
    """Optimizer steps that were finished."""
    tokens: int = 0
    """Label tokens of those steps."""
    loss_first: float | None = None
    loss_last: float | None = None
    tokens_per_s: float | None = None
    step_time_ms_p50: float | None = None
    step_time_ms_p95: float | None = None
    forward_ms_p50: float | None = None
    backward_ms_p50: float | None = None
    peak_gib: float | None = None
    held_mib: float | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run, as its readers see it. ``numerics`` is None where no number was made."""

    schema_version: str = SCHEMA_VERSION
    verdict: str
    exit_code: int
    message: str | None
    """One line: why the request was refused, or what ended the run."""
    numerics: str | None
    command: str
    """Quoted for a shell."""
    config: dict[str, Any]
    environment: dict[str, Any]
    plan: tuple[Choice, ...]
    checks: tuple[Finding, ...]
    summary: Summary
    baseline: RunMark | None = None
    """What ``smoke baseline update`` records of the run besides its losses; None where training was not finished."""
    artifacts: tuple[str, ...] = ()
    """Files of the run folder."""

    @property
    def times_of(self) -> str:
        """What the times are times of: emulation, native or bf16; empty where nothing ran."""
        return LABELS.get(self.numerics or "", "")

    @property
    def name(self) -> str:
        """Precision and recompute set, e.g. ``mxfp8 with recompute mla_up_proj``."""
        regions = "+".join(self.config["recompute"]) or "none"
        return f"{self.config['precision']} with recompute {regions}"

    def with_status(self, *statuses: str) -> list[str]:
        """Names of the checks with one of the statuses."""
        return [check.name for check in self.checks if check.status in statuses]


def build(
    record: Record,
    plan: Plan,
    findings: Sequence[Finding],
    *,
    environment: Environment,
    command: Sequence[str],
    interrupted_signal: int | None = None,
    crashed: bool = False,
    message: str | None = None,
) -> Report:
    """Report of a run that finished, crashed or was interrupted.

    Args:
        record: what was measured, as far as it got.
        plan: what was to be done.
        findings: of ``smoke.checks.judge``, or fewer.
        environment: the machine.
        command: words of the command line.
        interrupted_signal: number of the signal that stopped the run.
        crashed: the run ended in an exception.
        message: one line on what ended it.
    """
    outside = any(f.name == "baseline" and f.status == SKIP for f in findings) and "baseline" not in plan.skipped
    verdict, code = verdict_and_exit(
        findings,
        [name for name in plan.required if not (outside and name == "baseline")],
        interrupted_signal=interrupted_signal,
        crashed=crashed,
        baseline_missing=outside and plan.config.require_baseline,
    )
    ended = "interrupted" if interrupted_signal is not None else "crashed" if crashed else ""
    return Report(
        verdict=verdict,
        exit_code=code,
        message=message,
        numerics=plan.numerics,
        command=shlex.join(command),
        config=plain(plan.config),
        environment=_facts(environment),
        plan=plan.choices,
        checks=(*findings, *_missing(findings, plan.required, ended)),
        summary=summarize(record),
        baseline=record.mark,
    )


def refused(refusal: Refusal, config: RunConfig, environment: Environment, command: Sequence[str]) -> Report:
    """Report of a request that the plan refused: no check, no number."""
    verdict, code = verdict_and_exit([], [], refusal=refusal)
    return Report(
        verdict=verdict,
        exit_code=code,
        message=refusal.message,
        numerics=None,
        command=shlex.join(command),
        config=plain(config),
        environment=_facts(environment),
        plan=(),
        checks=(),
        summary=Summary(),
    )


def _facts(environment: Environment) -> dict[str, Any]:
    facts = plain(environment)
    return facts | {name: plain(dict(getattr(environment, name))) for name in ("packages", "transformer_engine")}


def _missing(findings: Sequence[Finding], required: Sequence[str], ended: str) -> list[Finding]:
    """A line for each required check that nobody judged."""
    judged = {finding.name for finding in findings}
    if ended:
        status, detail = SKIP, f"the run {'was ' if ended == 'interrupted' else ''}{ended} before it was judged"
    else:
        status, detail = ERROR, "required, but it was not judged"
    return [Finding(name=name, status=status, detail=detail) for name in required if name not in judged]


def summarize(record: Record) -> Summary:
    """Main numbers of a record."""
    steps, times = record.steps, record.throughput
    return Summary(
        steps=len(steps),
        tokens=sum(row.tokens for row in steps),
        loss_first=steps[0].loss if steps else None,
        loss_last=steps[-1].loss if steps else None,
        tokens_per_s=times.tokens_per_s if times else None,
        step_time_ms_p50=times.step_time_ms_p50 if times else None,
        step_time_ms_p95=times.step_time_ms_p95 if times else None,
        forward_ms_p50=times.forward_ms_p50 if times else None,
        backward_ms_p50=times.backward_ms_p50 if times else None,
        peak_gib=record.peak_gib,
        held_mib=record.held_mib,
    )


def verdict_line(report: Report) -> str:
    """The line that a reader in a hurry reads. It says how the numbers were made: emulated never reads as native."""
    how = f" ({report.numerics})" if report.numerics else ""
    start = f"{report.verdict.upper()}{how}: {report.name}"
    return f"{start}: {'; '.join(_reasons(report))}; exit code {report.exit_code}"


def _reasons(report: Report) -> list[str]:
    reasons = [report.message] if report.message else []
    for status, words in ((FAIL, "failed"), (ERROR, "could not judge")):
        names = report.with_status(status)
        if names:
            reasons.append(f"{', '.join(names)} {words}")
    if report.exit_code == 6:
        reasons.append("no baseline to judge by")
    passed, skipped = len(report.with_status(PASS)), len(report.with_status(SKIP))
    if report.checks:
        reasons.append(f"{passed} of {len(report.checks)} checks passed, {skipped} skipped")
    return reasons or ["no check ran"]
