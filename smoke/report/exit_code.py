"""Verdict and exit code of a run, from its findings alone.

    0 pass          every required check passed
    1 fail          a required check failed
    2 error         usage or configuration (decided by the plan)
    3 error         crash, or a required check could not judge (a required check without a finding is one)
    4 unsupported   this machine lacks something, a required check was skipped, or no check ran
    5 blocked       by an installed package (decided by the plan)
    6 unsupported   no baseline to judge by
    128 + n         interrupted by signal n: 130 SIGINT, 143 SIGTERM

Where several apply: 3 before 1 before 6 before 4. An interruption is reported as one whatever the checks said until
then, because they judged half a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smoke.checks import FAIL, PASS, SKIP, Finding
from smoke.plan import Refusal

SIGNAL_BASE = 128
"""What a shell adds to the number of the signal that ended a process."""
VERDICTS = {0: "pass", 1: "fail", 2: "error", 3: "error", 4: "unsupported", 5: "blocked", 6: "unsupported"}
PRECEDENCE = (3, 1, 6, 4)
SEVERITY = (143, 130, 3, 2, 1, 6, 5, 4)
"""Which row's code ``smoke matrix`` ends in."""


def verdict_and_exit(
    findings: Sequence[Finding],
    required: Iterable[str],
    *,
    interrupted_signal: int | None = None,
    crashed: bool = False,
    refusal: Refusal | None = None,
    baseline_missing: bool = False,
) -> tuple[str, int]:
    """Verdict word and exit code. Checks that are not required do not count, whatever they say.

    Args:
        findings: any number for a name; the worst counts.
        required: names that must pass.
        interrupted_signal: number of the signal that stopped the run.
        crashed: the run ended in an exception.
        refusal: the plan refused; nothing else can apply then.
        baseline_missing: a baseline was required and there is none for this toolchain.
    """
    if refusal is not None:
        return refusal.verdict, refusal.exit_code
    if interrupted_signal is not None:
        return "interrupted", SIGNAL_BASE + interrupted_signal
    codes = {_code(statuses) for statuses in _statuses(findings, required).values()}
    if crashed:
        codes.add(3)
    if baseline_missing:
        codes.add(6)
    if all(finding.status == SKIP for finding in findings):
        codes.add(4)
    code = next((code for code in PRECEDENCE if code in codes), 0)
    return VERDICTS[code], code


def _statuses(findings: Sequence[Finding], required: Iterable[str]) -> dict[str, list[str]]:
    return {name: [f.status for f in findings if f.name == name] for name in required}


def _code(statuses: list[str]) -> int:
    """Code of one required check. A word that is no status counts as ERROR."""
    if not statuses or any(status not in (PASS, FAIL, SKIP) for status in statuses):
        return 3
    if FAIL in statuses:
        return 1
    return 4 if SKIP in statuses else 0


def worst(codes: Iterable[int]) -> int:
    """One exit code for several runs. No run at all is 4, as no check is."""
    found = set(codes)
    if not found:
        return 4
    return next((code for code in SEVERITY if code in found), max(found))
