"""``smoke selftest``: every check is seen red under an injected fault, and green without one.

Each fault runs in the small configuration with what it changes of it, in this process, one after the other. Before the
first fault of a configuration comes a run without any, which must be green: what is red afterwards is the fault's
doing. That run also trains the BF16 twin, whose curves its faults share, so a fault that bends the twin as well is
compared with a sound one. Where the configuration names a baseline, that run is recorded in it, and judged again with
it. The order of the faults is kept inside a configuration.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from smoke import report as reports
from smoke.checks import ERROR, FAIL, PASS, SKIP, Finding, judge
from smoke.config import RunConfig
from smoke.environment import Environment
from smoke.faults import Fault, injected, small_config
from smoke.plan import USAGE, Plan, Refusal, resolve
from smoke.record import Record
from smoke.report import SelftestRow
from smoke.report.exit_code import SIGNAL_BASE
from smoke.run import Outcome, Shared, attempt
from smoke.run.baseline import record_baseline
from smoke.run.interrupt import Interrupted, interruptible

NAME = "selftest.json"
Run = tuple[Plan, Fault | None]


def run_selftest(
    faults: Sequence[Fault], environment: Environment, command: Sequence[str], *, out: str | None, device: str
) -> int:
    """Show every fault, print the table, write selftest.json, and return the exit code. Raises Refusal."""
    folder = reports.create(RunConfig(out=out), words="selftest")
    runs = list(_runs(faults, environment, device, folder))
    rows: list[SelftestRow] = []
    try:
        with interruptible():
            interrupted = _show_all(folder, runs, environment, rows)
    except Interrupted as stop:
        interrupted = stop.signal_number
    verdict, code = ("interrupted", SIGNAL_BASE + interrupted) if interrupted else reports.selftest_exit(rows)
    text = reports.selftest_json(rows, verdict, code, command=command, environment=environment)
    try:
        reports.write_atomic(folder / NAME, text)
    except OSError as error:
        raise Refusal(USAGE, f"--out {folder}: cannot be written: {error.strerror}") from None
    reports.show_selftest(rows, reports.selftest_line(rows, verdict, code), verdict)
    print(f"report: {folder / NAME}")
    return code


def _show_all(folder: pathlib.Path, runs: Sequence[Run], environment: Environment, rows: list[SelftestRow]) -> int:
    """Fill ``rows``, and print each as it comes. Returns the signal that interrupted a run, or 0."""
    shared = Shared()
    for number, (plan, fault) in enumerate(runs, 1):
        name = fault.name if fault else "sound"
        row, interrupted = _show(folder / f"{number:02}-{name}", plan, fault, environment, shared)
        rows.append(row)
        name = row.fault or f"no fault: {row.config}"
        print(f"[{number}/{len(runs)}] {row.status} {name}: {_words(row)} ({row.seconds:.1f} s)", flush=True)
        if interrupted:
            return interrupted
    return 0


def _runs(faults: Sequence[Fault], environment: Environment, device: str, folder: pathlib.Path) -> Iterator[Run]:
    """Plan of every run: for each configuration the run without a fault, then its faults."""
    groups: dict[str, list[tuple[Plan, Fault]]] = {}
    for fault in faults:
        config = small_config(**{"device": device, **({} if _missing(fault, environment) else fault.changes)})
        if config.baseline is not None:
            config = replace(config, baseline=str(folder / config.baseline))
        plan = resolve(config, environment)
        groups.setdefault(repr(plan.config), []).append((plan, fault))
    for group in groups.values():
        yield group[0][0], None
        yield from group


def _missing(fault: Fault, environment: Environment) -> str:
    """Why the fault cannot be shown here; empty when it can."""
    if fault.needs_cuda and not environment.cuda_available:
        return "needs a CUDA device"
    return environment.missing("triton") if fault.needs_triton else ""


def _show(
    folder: pathlib.Path, plan: Plan, fault: Fault | None, environment: Environment, shared: Shared
) -> tuple[SelftestRow, int]:
    """One run: its row, and the signal that interrupted it, or 0."""
    start = time.perf_counter()
    if fault is not None and (missing := _missing(fault, environment)):
        return _row(plan, fault, SKIP, (), "", missing, 0.0), 0
    folder.mkdir()
    record = Record()
    if fault is None:
        outcome = attempt(folder, plan, record, shared, True)
        if plan.config.baseline is not None and record.mark is not None:
            record_baseline(plan.config.baseline, record, plan)
            outcome.findings = judge(record, plan)
    else:
        with injected(fault):
            outcome = attempt(folder, plan, record, shared, True)
    status, detail = verdict_of(fault, outcome)
    where = _place(_first(fault, outcome.findings))
    red = tuple(finding.name for finding in outcome.findings if _is_red(finding))
    row = _row(plan, fault, status, red, where, detail, time.perf_counter() - start)
    return row, outcome.interrupted_signal or 0


def verdict_of(fault: Fault | None, outcome: Outcome) -> tuple[str, str]:
    """PASS, FAIL or ERROR, and what is wrong. Pure: the findings of one run against what its fault says."""
    if outcome.crashed or outcome.interrupted_signal is not None:
        return ERROR, outcome.message or "the run broke off"
    red = [finding.name for finding in outcome.findings if _is_red(finding)]
    if fault is None:
        return (FAIL, f"red without a fault: {', '.join(red)}") if red else (PASS, "")
    found = _first(fault, outcome.findings)
    problems = [f"{name} stayed green" for name in fault.red if name not in red]
    problems += [f"{name} is red too" for name in red if name not in (*fault.red, *fault.may_follow)]
    if found is not None and _is_red(found) and fault.where not in f"{found.where} {found.detail}":
        problems.append(f"{found.name} does not name {fault.where!r}")
    return (FAIL, "; ".join(problems)) if problems else (PASS, "")


def _first(fault: Fault | None, findings: Sequence[Finding]) -> Finding | None:
    """The finding of the first check that the fault must turn red."""
    wanted = fault.red[0] if fault is not None else None
    return next((finding for finding in findings if finding.name == wanted), None)


def _is_red(finding: Finding) -> bool:
    return finding.status in (FAIL, ERROR)


def _place(finding: Finding | None) -> str:
    return (finding.where or finding.detail) if finding is not None and _is_red(finding) else ""


def _row(
    plan: Plan, fault: Fault | None, status: str, red: tuple[str, ...], where: str, detail: str, seconds: float
) -> SelftestRow:
    config = plan.config
    return SelftestRow(
        fault=fault.name if fault else "",
        row=fault.row if fault else 0,
        summary=fault.summary if fault else "",
        config=f"{config.precision}, recompute {'+'.join(config.recompute) or 'none'}, {config.layout}",
        expected=fault.red if fault else (),
        may_follow=fault.may_follow if fault else (),
        red=red,
        status=status,
        where=where,
        detail=detail,
        seconds=round(seconds, 3),
    )


def _words(row: SelftestRow) -> str:
    return row.detail or (f"red: {', '.join(row.red)}" if row.red else "all green")
