"""``smoke replay BUNDLE``: the failures of a bundle alone, in this process, and whether they come again.

The run is planned from the bundle's options with every other check skipped, begins with the bundle's batches and state,
and has the bundle's fault injected if it names one. Generated batches are made again from the seed, so that a fault in
making them can be mended, too. Without a check that watches training, nothing is trained. Then each check judges as it
always does:

    1   reproduced: a check is red again, with the status that it had
    0   did not reproduce: every check of the bundle passes here
    2   no bundle that this version can replay
    3   neither: the replay crashed, or a check could not judge that could before
    4   the bundle's device or operations are not here

so that ``git bisect run smoke replay BUNDLE`` finds the commit that mended or broke it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from contextlib import nullcontext

from smoke import faults
from smoke.checks import PASS, Finding
from smoke.config import RunConfig
from smoke.environment import Environment
from smoke.output import printable
from smoke.plan import Plan, resolve
from smoke.record import Record
from smoke.report.exit_code import SIGNAL_BASE
from smoke.requirements import CHECKS
from smoke.run import Outcome, Shared, attempt
from smoke.run.bundle import Bundle, BundleError, Failure, Start
from smoke.run.failures import fresh, located

GONE, REPRODUCED, UNSURE = 0, 1, 3


def replay(folder: pathlib.Path, bundle: Bundle, config: RunConfig, environment: Environment) -> int:
    """Reproduce the failures and print what came of each; returns the exit code. BundleError, Refusal."""
    fault = _fault(bundle)
    plan = _plan(bundle, config, environment)
    from smoke.run.tensors import load_start  # imports torch, which takes seconds

    start = load_start(folder, plan.config)
    if bundle.source == "generated":
        start.batches = None
    _print(f"bundle of smoke {bundle.smoke}: seed {bundle.seed}, {_versions(bundle, environment)}")
    if fault is not None:
        _print(f"with the fault {fault.name} injected: {fault.summary}")
    with faults.injected(fault) if fault is not None else nullcontext():
        outcome = _run(plan, start)
    if outcome.interrupted_signal is not None:
        _print(f"interrupted: {outcome.message}")
        return SIGNAL_BASE + outcome.interrupted_signal
    codes = [_told(failure, outcome.findings) for failure in bundle.failures]
    code = next(code for code in (REPRODUCED, UNSURE, GONE) if code in codes)
    if outcome.crashed and code != REPRODUCED:
        code = UNSURE
    _print(f"{_verdict(code, codes, outcome)}; exit code {code}")
    return code


def _fault(bundle: Bundle) -> faults.Fault | None:
    try:
        return faults.by_name(bundle.fault) if bundle.fault else None
    except LookupError as error:
        raise BundleError(f"bundle.json: {error.args[0]}") from None


def _plan(bundle: Bundle, config: RunConfig, environment: Environment) -> Plan:
    """The plan of the bundle's run, with its own source, and only the checks that were red."""
    wanted = {failure.check for failure in bundle.failures}
    check = dataclasses.replace(config.check, skip=tuple(name for name in CHECKS if name not in wanted))
    plan = resolve(dataclasses.replace(config, check=check), environment)
    data = dataclasses.replace(config.data, source=bundle.source)
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, data=data))


def _run(plan: Plan, start: Start) -> Outcome:
    """Measure and judge; red parity checks are located again."""
    from smoke.trajectories import untouched_random_states

    with untouched_random_states():
        fresh(plan, start)  # a bundle that does not fit ends here, in one line
        with tempfile.TemporaryDirectory() as scratch:
            outcome = attempt(pathlib.Path(scratch), plan, Record(), Shared(), True, start)
        if not outcome.crashed and outcome.interrupted_signal is None and any(map(_is_red, outcome.findings)):
            located(plan, outcome, start)
    return outcome


def _is_red(finding: Finding) -> bool:
    return finding.status in ("FAIL", "ERROR")


def _told(failure: Failure, findings: list[Finding]) -> int:
    """Print one check's line and return its code."""
    found = next((one for one in findings if one.name == failure.check), None)
    if found is None:
        _print(f"{failure.check}: not judged")
        return UNSURE
    if found.status == PASS:
        _print(f"{failure.check}: did not reproduce: PASS, {found.measured} (was {failure.status} at {failure.where})")
        return GONE
    if found.status != failure.status:
        _print(f"{failure.check}: {found.status} in place of {failure.status}: {found.detail}")
        return UNSURE
    same = "the same place" if found.where == failure.where else f"it was at {failure.where}"
    _print(f"{failure.check}: reproduced: {found.status} {found.measured} at {found.where} ({same})")
    if found.detail:
        _print(f"    {found.detail}")
    return REPRODUCED


def _verdict(code: int, codes: list[int], outcome: Outcome) -> str:
    if code == REPRODUCED:
        return f"reproduced: {codes.count(REPRODUCED)} of {len(codes)}"
    if code == GONE:
        return f"did not reproduce: {len(codes)} of {len(codes)} pass here"
    return f"could not judge{': ' + outcome.message if outcome.message else ''}"


def _versions(bundle: Bundle, environment: Environment) -> str:
    then, now = (packages.get("torch", "none") for packages in (bundle.packages, environment.packages))
    return f"torch {then}" + ("" if then == now else f" (here {now})")


def _print(line: str) -> None:
    print(printable(line), flush=True)
