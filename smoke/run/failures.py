"""What a red run does before its report is written: it locates its red checks and saves the bundle that repeats them.

Both work on a fresh session, made from the plan as the run's own was, so nothing depends on what training left behind.
A fault that is injected is in the program here too, and its name goes into the bundle. What cannot be located or saved
costs no report: it is one line at the terminal.
"""

from __future__ import annotations

import pathlib
import shlex
import shutil
import sys
import traceback
from typing import TYPE_CHECKING, Any

from smoke import faults
from smoke.environment import Environment
from smoke.plan import Plan
from smoke.report.folder import BUNDLE
from smoke.run.bundle import Failure, Start, bundle_config, of_findings, write
from smoke.run.interrupt import Interrupted, interruptible

if TYPE_CHECKING:
    from smoke.run import Outcome
    from smoke.run.session import Session


def keep_failures(folder: pathlib.Path, plan: Plan, environment: Environment, outcome: Outcome) -> None:
    """Tell where each red check begins, in its finding's detail, and write ``folder/bundle``. Raises nothing."""
    if not of_findings(outcome.findings) or outcome.interrupted_signal is not None or outcome.crashed:
        return
    try:
        with interruptible():
            _keep(folder, plan, environment, outcome)
    except Interrupted as stop:
        outcome.interrupted_signal, outcome.message = stop.signal_number, f"stopped by {stop}"
    except OSError as error:
        shutil.rmtree(folder / BUNDLE, ignore_errors=True)  # what is left of the disk is for the report
        print(f"smoke: {folder / BUNDLE}: cannot be written: {error.strerror}", file=sys.stderr)
    except Exception:  # of the model or kernel that is being located: the findings stand without a place
        traceback.print_exc()
        print("smoke: the red checks could not be located; the traceback is above", file=sys.stderr)


def _keep(folder: pathlib.Path, plan: Plan, environment: Environment, outcome: Outcome) -> None:
    from smoke.trajectories import untouched_random_states

    with untouched_random_states():
        start, failures = located(plan, outcome, None)
    if not plan.config.check.bundle:
        return
    facts = {
        "command": shlex.join(["smoke", "replay", str(folder / BUNDLE)]),
        "fault": faults.active(),
        "source": plan.config.data.source,
        "packages": dict(environment.packages),
        "failures": tuple(failures),
    }
    write(folder / BUNDLE, facts, bundle_config(plan.config, device=plan.device, impl=plan.impl), start)


def located(plan: Plan, outcome: Outcome, start: Start | None) -> tuple[Start, list[Failure]]:
    """Locate the red findings of an outcome, in place; what a bundle says of them, and the state they start from."""
    from smoke.record import plain
    from smoke.run.locate import LOCATORS, locate, step_of, told
    from smoke.run.tensors import start_of

    failures = []
    for number, finding in enumerate(outcome.findings):
        if finding not in of_findings(outcome.findings):
            continue
        departures: tuple[Any, ...] = ()
        session = fresh(plan, start) if start is None or finding.name in LOCATORS else None
        if session is not None:
            start = start or start_of(session)
            found = locate(finding, session)
            start.observed |= found.observed
            departures = tuple(plain(one) for one in found.departures)
            outcome.findings[number] = told(finding, found)
        failures.append(
            Failure(
                check=finding.name,
                status=finding.status,
                step=step_of(finding),
                where=finding.where,
                measured=finding.measured,
                detail=outcome.findings[number].detail,
                departures=departures,
            )
        )
    assert start is not None, "a bundle is made of red findings"
    return start, failures


def fresh(plan: Plan, start: Start | None) -> Session:
    """A session as a run begins with, and torch's random state; with ``start``, of its batches and its state."""
    import torch

    from smoke.run.session import build, load_data
    from smoke.run.tensors import restore

    torch.manual_seed(plan.config.seed)
    session = build(plan, *load_data(plan, start.batches if start else None))
    if start is not None:
        restore(session, start)
    return session
