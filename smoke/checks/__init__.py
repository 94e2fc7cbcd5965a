"""Judges a record: one pure function for each check, no tensor, no clock, no file.

Every check has been seen red: its tests spoil a sound record in each way that the check exists for. Comparisons are
written so that a NaN fails them, and a required check that measured nothing is an ERROR, never a PASS.

To add a check: write a function ``(record, plan, limits) -> Finding``, list it in ``CHECKS``, and add the fault that
turns it red to its tests.
"""

from __future__ import annotations

from typing import Any

from smoke.checks.attention import attention_backend
from smoke.checks.baseline import baseline
from smoke.checks.bits import determinism, recompute_parity
from smoke.checks.coverage import coverage, preflight
from smoke.checks.finding import ERROR, FAIL, PASS, SKIP, Check, Finding
from smoke.checks.gradients import gradient_parity, gradient_presence, quantization_engaged
from smoke.checks.ledgers import dtype_ledger, neutrality, weight_freshness
from smoke.checks.rope import rope_contract
from smoke.checks.saved import saved_tensors
from smoke.checks.steps import accumulation_parity, resume_parity
from smoke.checks.training import loss_tracking, memory, throughput
from smoke.checks.values import absorbed_parity, finite, packed_parity, quantizer
from smoke.record import Record

__all__ = ["CHECKS", "ERROR", "FAIL", "PASS", "SKIP", "Finding", "judge"]

CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        preflight,
        coverage,
        quantizer,
        recompute_parity,
        gradient_parity,
        quantization_engaged,
        absorbed_parity,
        packed_parity,
        rope_contract,
        saved_tensors,
        finite,
        weight_freshness,
        gradient_presence,
        dtype_ledger,
        loss_tracking,
        memory,
        throughput,
        determinism,
        neutrality,
        attention_backend,
        accumulation_parity,
        resume_parity,
        baseline,
    )
}


def judge(record: Record, plan: Any, limits: Any = None) -> list[Finding]:
    """Findings in the order of ``CHECKS``, then of the plan.

    Args:
        record: what was measured.
        plan: its ``required`` checks run, its ``skipped`` ones (name to reason) become SKIP; a check that is in both is
            not run. A required name that is no check is an ERROR.
        limits: by default ``plan.recipe.limits``.
    """
    limits = plan.recipe.limits if limits is None else limits
    names = [*plan.required, *(name for name in plan.skipped if name not in plan.required)]
    order = {name: index for index, name in enumerate(CHECKS)}
    return [_judge_one(name, record, plan, limits) for name in sorted(names, key=lambda n: order.get(n, len(order)))]


def _judge_one(name: str, record: Record, plan: Any, limits: Any) -> Finding:
    if name in plan.skipped:
        return Finding(name=name, status=SKIP, detail=plan.skipped[name])
    if name not in CHECKS:
        return Finding(name=name, status=ERROR, detail="this version has no such check")
    return CHECKS[name](record, plan, limits)
