"""attention_backend: core attention ran in a fused kernel, in every module and every call."""

from __future__ import annotations

from typing import Any

from smoke.checks.finding import Finding, failed, passed, unable
from smoke.record import AttentionRow, Record

FUSED = ("flash", "efficient", "cudnn", "overrideable")


def attention_backend(record: Record, plan: Any, limits: Any) -> Finding:
    """No call fell to the unfused path, which is slow and saves every probability."""
    name, rows = "attention_backend", [row for row in record.attention if row.calls]
    limit = f"a fused kernel ({', '.join(FUSED[:3])}) in every call"
    unfused = [row for row in rows if row.backend not in FUSED]
    if unfused:
        row, calls = unfused[0], sum(row.calls for row in unfused)
        detail = f"{row.dtype}, query, key and value of {row.columns} columns; {_others(rows, row)}"
        return failed(name, f"{calls} calls unfused ({row.backend})", limit, row.module, detail)
    idle = {row.module for row in record.attention} - {row.module for row in rows}
    if not rows or idle:
        return unable(name, "measured nothing: no call of core attention was seen", ", ".join(sorted(idle)))
    kernels = ", ".join(f"{sum(row.calls for row in rows if row.backend == b)} x {b}" for b in _backends(rows))
    return passed(name, f"{kernels} in {len({row.module for row in rows})} modules", limit)


def _backends(rows: list[AttentionRow]) -> list[str]:
    return sorted({row.backend for row in rows})


def _others(rows: list[AttentionRow], first: AttentionRow) -> str:
    """How far the fall reaches: every module, or how many of them."""
    modules = {row.module for row in rows}
    fallen = {row.module for row in rows if row.backend not in FUSED}
    return "every module" if modules == fallen else f"{len(fallen)} of {len(modules)} modules"
