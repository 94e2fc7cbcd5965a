"""preflight: sizes of the live model. coverage: which GEMMs really ran quantized, first pass and replay apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from smoke.checks.finding import Finding, failed, passed, quantizes, unable
from smoke.record import CoverageRow, PreflightRow, Record

GEMMS = ("output", "grad_input", "grad_weight")
HIGH_PRECISION = ("output_layer", "router", "embedding")
"""Modules that no recipe quantizes: a planned or quantized row of theirs is an accident."""
WEIGHT_HOLDERS = ("linear_kv_up_proj", "linear_k_up_proj", "linear_v_up_proj")
"""In the absorbed form these hold a weight that the absorbed products use; their own GEMM never runs."""
REPLAYED = {
    "mla_up_proj": r"\.(linear_q_up_proj|linear_q_proj|k_up_absorbed|linear_kv_up_proj|linear_[kv]_up_proj)$",
    "mlp": r"\.mlp\.linear_fc[12]$",
}
"""Leaves whose output GEMM a recompute region runs again; the other regions hold no GEMM."""


def preflight(record: Record, plan: Any, limits: Any) -> Finding:
    """Every size of the live model and batch is one that the recipe and the kernels take."""
    rows = record.preflight
    if not rows:
        return unable("preflight", "measured nothing: no size of the live model is in the record")
    for row in rows:
        if not _fits(row):
            wanted = {"multiple": "a multiple of", "equal": "equal to", "at_least": "at least"}.get(row.rule, row.rule)
            return failed(
                "preflight", f"{row.quantity} {row.value}", f"{wanted} {row.required}", row.name, "size cannot be taken"
            )
    return passed("preflight", f"{len(rows)} sizes", "all legal for the recipe and the kernels")


def _fits(row: PreflightRow) -> bool:
    if row.rule == "multiple":
        return row.value > 0 and row.required > 0 and row.value % row.required == 0
    if row.rule == "at_least":
        return row.value >= row.required
    return row.rule == "equal" and row.value == row.required


def coverage(record: Record, plan: Any, limits: Any) -> Finding:
    """Planned GEMMs ran quantized and never in BF16, in both passes and in replays; every other leaf ran, in BF16."""
    name, rows = "coverage", record.coverage
    limit = "every planned GEMM quantized in forward, backward and replay; every other leaf run in BF16"
    if not rows and not quantizes(plan):
        return unable(name, "measured nothing: no GEMM is in the record")
    planned = [row for row in rows if row.planned]
    if quantizes(plan) and not planned:
        return failed(name, f"0 of {len(rows)} GEMMs converted", limit, detail="conversion matched nothing")
    problems = [f for row in rows for f in _row_problems(row, plan)] + list(_missing_gemms(planned))
    if problems:
        where, measured = problems[0]
        more = f"and {len(problems) - 1} more: " + "; ".join(w for w, _ in problems[1:6]) if problems[1:] else ""
        return failed(name, measured, limit, where, more)
    ran = sum(row.quantized_calls > 0 for row in planned)
    replays = sum(row.replay_quantized_calls > 0 for row in planned)
    return passed(name, f"{ran} of {len(rows)} GEMMs quantized, {replays} also in replay", limit)


def _row_problems(row: CoverageRow, plan: Any) -> Iterator[tuple[str, str]]:
    """(where, what) of everything wrong with one row."""
    where = f"{row.module} {row.gemm}"
    quantized = row.quantized_calls + row.replay_quantized_calls
    if (row.planned or quantized) and set(row.module.split(".")) & set(HIGH_PRECISION):
        yield where, f"unexpected row: planned {row.planned}, {quantized} quantized calls ({row.format})"
    elif not row.planned:
        if quantized:
            yield where, f"unexpected: {quantized} quantized calls of a GEMM that stays in BF16 ({row.reason})"
        if row.gemm == "output" and not row.bf16_calls and not _holds_weight_only(row, plan):
            yield where, "never ran"
    elif not quantizes(plan):
        yield where, "planned as quantized in a bf16 run"
    else:
        if row.bf16_calls:
            yield where, f"{row.bf16_calls} calls in BF16"
        if row.replay_bf16_calls:
            yield f"{where} (replay)", f"{row.replay_bf16_calls} replayed calls in BF16"
        if not row.quantized_calls and not _holds_weight_only(row, plan):
            yield where, "no quantized call"
        if not row.replay_quantized_calls and _replayed(row, plan):
            yield f"{where} (replay)", "no quantized call in the replay"


def _holds_weight_only(row: CoverageRow, plan: Any) -> bool:
    absorbed = plan.config.model.attention_form == "absorbed"
    return absorbed and row.module.rpartition(".")[2] in WEIGHT_HOLDERS


def _replayed(row: CoverageRow, plan: Any) -> bool:
    """Whether a recompute region of the plan runs this GEMM a second time."""
    if row.gemm != "output" or _holds_weight_only(row, plan):
        return False
    return any(region in REPLAYED and re.search(REPLAYED[region], f".{row.module}") for region in plan.config.recompute)


def _missing_gemms(planned: list[CoverageRow]) -> Iterator[tuple[str, str]]:
    """Converted modules without a row for each of their three GEMMs."""
    seen: dict[str, set[str]] = {}
    for row in planned:
        seen.setdefault(row.module, set()).add(row.gemm)
    for module, gemms in seen.items():
        for gemm in GEMMS:
            if gemm not in gemms:
                yield f"{module} {gemm}", "no row: the GEMM is not in the record"
