"""Runs a plan: measure, train, judge, report. The only room that knows all rooms.

    execute         one plan, its tables at the terminal and its run folder; returns the exit code
    execute_matrix  several plans in one process, one table; the BF16 twin's curves are shared between rows
    refuse          a request that the plan refused still leaves a report where the folder can be made

Torch and Lightning are imported by the function that needs them.
"""

from __future__ import annotations

import contextlib
import pathlib
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from smoke import report as reports
from smoke.baseline.file import BaselineError
from smoke.checks import Finding, judge
from smoke.config import RunConfig
from smoke.data.sources import DataError
from smoke.environment import Environment
from smoke.output import printable
from smoke.plan import USAGE, Plan, Refusal
from smoke.record import Record
from smoke.report.folder import disk_refusal
from smoke.run.baseline import Comparison
from smoke.run.bundle import Start
from smoke.run.failures import keep_failures
from smoke.run.interrupt import Interrupted, interruptible, undisturbed

BEFORE_TRAINING = (
    "preflight",
    "quantizer",
    "recompute_parity",
    "absorbed_parity",
    "packed_parity",
    "rope_contract",
    "memory",
    "determinism",
    "accumulation_parity",
)
"""Checks that can be judged although training broke off."""


@dataclass
class Shared:
    """What rows of a matrix have in common: the process, and twin curves by the options that they depend on."""

    curves: dict[Any, Any] = field(default_factory=dict)
    runs: int = 0
    """Runs that this process has begun."""


@dataclass
class Outcome:
    """How a run ended."""

    findings: list[Finding] = field(default_factory=list)
    interrupted_signal: int | None = None
    crashed: bool = False
    message: str | None = None


def execute(plan: Plan, environment: Environment, command: Sequence[str]) -> int:
    """Run one plan and return its exit code; nothing raised, nothing lost."""
    try:
        folder = reports.create(plan.config)
    except Refusal as refusal:
        return _fail(refusal)
    try:
        report, _ = run_into(folder, plan, environment, command, Shared())
    except Refusal as refusal:
        refuse(refusal, plan.config, environment, command, folder)
        return _fail(refusal)
    with undisturbed() if report.verdict == "interrupted" else contextlib.nullcontext():
        reports.show_report(report, folder)
    return report.exit_code


def execute_matrix(plans: Sequence[Plan], environment: Environment, command: Sequence[str]) -> int:
    """Run every plan, print one table, return the worst exit code. A refusal ends it; rows that ran are still shown."""
    shared, rows, codes, refused = Shared(), [], [], None
    with contextlib.ExitStack() as unused:
        try:
            named = [_row_of_matrix(plan, unused) for plan in plans]
            for number, (name, plan, folder) in enumerate(named, 1):
                print(f"[{number}/{len(plans)}] {name}", flush=True)
                folder = folder or reports.create(plan.config)
                report, record = run_into(folder, plan, environment, command, shared, quiet=True)
                rows.append(reports.matrix_row(report, record))
                codes.append(report.exit_code)
                print(printable(f"    {reports.verdict_line(report)} ({folder})"), flush=True)
                if report.verdict == "interrupted":
                    break
        except Refusal as refusal:
            refused = refusal
    if rows:
        reports.show_matrix(rows)
    if refused is not None:
        codes.append(_fail(refused))
    return reports.worst(codes)


def _row_of_matrix(plan: Plan, unused: contextlib.ExitStack) -> tuple[str, Plan, pathlib.Path | None]:
    """Name of one row, and its plan and folder under ``--out``: all are made before the first row runs."""
    config = plan.config
    name = f"{config.precision}-{'+'.join(config.recompute) or 'none'}"
    if config.out is None:
        return name, plan, None
    config = replace(config, out=str(pathlib.Path(config.out) / name))
    folder = reports.create(config)
    unused.callback(_remove_if_empty, folder)
    return name, replace(plan, config=config), folder


def _remove_if_empty(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def refuse(
    refusal: Refusal,
    config: RunConfig,
    environment: Environment,
    command: Sequence[str],
    folder: pathlib.Path | None = None,
) -> None:
    """Leave the report of a refused request in its run folder, if there can be one."""
    report = reports.refused(refusal, config, environment, command)
    with contextlib.suppress(Refusal, OSError):
        reports.write_all(folder or reports.create(config), report, Record(), config)


def run_into(
    folder: pathlib.Path,
    plan: Plan,
    environment: Environment,
    command: Sequence[str],
    shared: Shared,
    *,
    quiet: bool = False,
) -> tuple[reports.Report, Record]:
    """Run one plan and fill its folder. Raises Refusal when the data cannot serve it, or the disk while it trains."""
    record = Record()
    with undisturbed():
        outcome = attempt(folder, plan, record, shared, quiet)
        keep_failures(folder, plan, environment, outcome)
        if outcome.message and any(folder.glob("checkpoints/*")):
            outcome.message += f"; go on with --resume {shlex.quote(str(folder))}"
        report = reports.build(
            record,
            plan,
            outcome.findings,
            environment=environment,
            command=command,
            interrupted_signal=outcome.interrupted_signal,
            crashed=outcome.crashed,
            message=outcome.message,
        )
        try:
            return reports.write_all(folder, report, record, plan.config), record
        except OSError as error:
            return _unwritten(report, disk_refusal(folder, error)), record


def _unwritten(report: reports.Report, refusal: Refusal) -> reports.Report:
    """What was found out is still shown and counts; a run that passed does not pass without its report."""
    _fail(refusal)
    if report.exit_code == 0:
        report = replace(report, verdict=refusal.verdict, exit_code=refusal.exit_code)
    return replace(report, message=report.message or refusal.message)


def attempt(
    folder: pathlib.Path, plan: Plan, record: Record, shared: Shared, quiet: bool, start: Start | None = None
) -> Outcome:
    """Do the work and say how it ended. Signals interrupt in here only, where they are caught.

    With ``start`` the run begins with the batches and the state of a bundle, and trains only for checks that need it.
    """
    try:
        with interruptible():
            if not quiet:
                reports.show_plan(plan)
            from smoke.trajectories import untouched_random_states  # imports torch, which takes seconds

            with untouched_random_states():
                _work(folder, plan, record, shared, quiet, start)
            return Outcome(judge(record, plan))
    except Interrupted as stop:
        return Outcome(interrupted_signal=stop.signal_number, message=f"stopped by {stop}")
    except (DataError, BaselineError) as error:
        raise Refusal(USAGE, str(error)) from None
    except Refusal:
        raise
    except Exception as error:
        traceback.print_exc()
        return Outcome(_early(record, plan), crashed=True, message=f"{type(error).__name__}: {error}".splitlines()[0])


def _early(record: Record, plan: Plan) -> list[Finding]:
    """What can be judged after a crash; nothing where the crash was in a check."""
    try:
        return [finding for finding in judge(record, plan) if finding.name in BEFORE_TRAINING]
    except Exception:
        return []


def _work(folder: pathlib.Path, plan: Plan, record: Record, shared: Shared, quiet: bool, start: Start | None) -> None:
    """Fill the record: what is measured before training, the twin's curves, then training itself."""
    import torch

    from smoke.run import forms, measure
    from smoke.run.accumulate import accumulation_rows
    from smoke.run.neutral import watched_losses
    from smoke.run.resume import checkpoint_to_resume
    from smoke.run.rope import rope_rows
    from smoke.run.session import build, load_data
    from smoke.run.tensors import restore
    from smoke.run.train import train

    config = plan.config
    shared.runs += 1
    comparison = Comparison(plan, alone=shared.runs == 1)
    skipped = set(plan.skipped)
    checkpoint = checkpoint_to_resume(config)
    torch.manual_seed(config.seed)
    with _stage("data and model", quiet):
        data, batches = load_data(plan, start.batches if start else None)
        session = build(plan, data, batches)
        if start is not None:
            restore(session, start)
        record.entropy_floor = data.entropy_floor
        record.preflight = measure.preflight_rows(session)
    if "rope_contract" not in skipped:
        with _stage("rotary embedding against float64", quiet):
            record.rope = rope_rows(session)
    with _stage("quantizers and twin forms", quiet):
        record.quantizer = measure.quantizer_rows(session)
        if "absorbed_parity" not in skipped:
            record.twins += forms.absorbed_twins(session)
        if "packed_parity" not in skipped:
            record.twins += forms.packed_twins(session)
    if "accumulation_parity" not in skipped:
        record.accumulation = accumulation_rows(session)
    if not {"recompute_parity", "determinism", "memory", "neutrality"} <= skipped:
        with _stage(f"trajectories of {config.check.parity_steps} steps, compared bit by bit", quiet):
            record.bits, record.memory, record.held_mib, record.unwatched_losses = measure.parity(session)
    if "loss_tracking" not in skipped:
        with _stage("BF16 twin and its noise floor", quiet):
            _add_curves(plan, batches, record, shared)
    if start is not None and skipped.issuperset(name for name in plan.required if name not in BEFORE_TRAINING):
        return
    watched: tuple[str, ...] = ()
    if plan.device != "cpu" and "neutrality" not in skipped:
        with _stage("first steps with callbacks, deterministic", quiet):
            watched = watched_losses(session, min(config.steps, len(record.unwatched_losses)))
    if not quiet:
        print(f"training {config.steps} steps" + (f", from {checkpoint}" if checkpoint else ""), flush=True)
    train(folder, session, record, checkpoint)
    if watched:
        record.watched_losses = watched
    comparison.fill(record, batches)


def _add_curves(plan: Plan, batches: list[Any], record: Record, shared: Shared) -> None:
    from smoke.run.twin import twin_curves

    config = plan.config
    arithmetic = (config.trainer.accumulate_grad_batches, config.trainer.gradient_clip_val)
    parts = (config.model, config.data, config.train, config.layout, config.steps, config.seed, plan.device, plan.impl)
    key = repr((*parts, *arithmetic))
    if key not in shared.curves:
        shared.curves[key] = twin_curves(plan, batches)
    curves = shared.curves[key]
    record.curves = replace(record.curves, twin=curves.twin, perturbed=curves.perturbed, other_seed=curves.other_seed)


@contextlib.contextmanager
def _stage(name: str, quiet: bool) -> Iterator[None]:
    start = time.perf_counter()
    yield
    if not quiet:
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


def _fail(refusal: Refusal) -> int:
    print(f"smoke: {printable(refusal.message)}", file=sys.stderr)
    return refusal.exit_code
