"""weight_freshness, dtype_ledger and neutrality: fresh weights, types as planned, callbacks that change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smoke.checks.finding import Finding, failed, passed, unable
from smoke.record import DtypeRow, Record

DIRECTIONS = {"output": "row", "grad_input": "col"}
"""GEMMs that multiply the weight, and the direction of its operand there."""


def weight_freshness(record: Record, plan: Any, limits: Any) -> Finding:
    """Every weight operand that was looked at is a fresh quantization of the live Parameter, bit for bit."""
    name, rows = "weight_freshness", record.freshness
    limit = "every operand equal to a fresh quantization of the live weight, after an update"
    if not rows and record.coverage and not any(row.quantized_calls for row in record.coverage):
        return failed(name, "0 quantized weights", limit, detail="conversion matched nothing")
    if not rows:
        return unable(name, "measured nothing: no weight operand was compared")
    stale = sum(row.stale for row in rows)
    measured = f"{stale} of {sum(row.operands for row in rows):,} operands stale"
    for row in sorted(rows, key=lambda row: row.step):
        where = f"step {row.step} {row.module}.{row.parameter or 'weight'} ({row.direction} operand)"
        if row.stale:
            return failed(name, measured, limit, where, f"{row.used_hex} multiplied, {row.fresh_hex} when made anew")
        if row.operands < 1 or row.elements < 1:
            return unable(name, "the comparison covered no element", where)
        if row.step < 1:
            return unable(name, "compared before any update", where)
    compared = {(row.module, row.direction) for row in rows}
    for gemm in record.coverage:
        direction = DIRECTIONS.get(gemm.gemm)
        if direction and gemm.planned and gemm.quantized_calls and (gemm.module, direction) not in compared:
            return unable(name, f"its {direction} operand was never compared", gemm.module)
    steps = len({row.step for row in rows})
    return passed(name, f"{measured}, {len({row.module for row in rows})} modules, {steps} steps", limit)


EXPECTED = {
    "parameter": "bfloat16",
    "gradient": "bfloat16",
    "input": "bfloat16",
    "activation": "bfloat16",
    "master": "float32",
    "moment": "float32",
    "buffer": "float32",
    "loss": "float32",
}
"""Type of each kind of tensor, in every recipe: quantized formats live inside the leaves."""
EXPECTED_OF = {"router": EXPECTED | {"parameter": "float32", "gradient": "float32", "activation": "float32"}}
"""Modules, by the last part of their name, that have types of their own."""
HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
"""Hooks of every step."""
LEAST_LOSSES = 2
"""What a callback does in one step shows in the loss of the next."""


def dtype_ledger(record: Record, plan: Any, limits: Any) -> Finding:
    """Parameters, gradients, masters, moments, buffers and activations of every module have the planned type."""
    name, rows = "dtype_ledger", record.dtypes
    limit = "BF16 parameters, activations and gradients; float32 masters, moments, buffers, losses and router"
    wrong = [row for row in rows if row.dtype != _expected(row, plan)]
    if wrong:
        first = wrong[0]
        others = ", ".join(dict.fromkeys(f"{row.module} {row.kind}" for row in wrong[1:5]))
        detail = f"{_expected(first, plan)} expected" + (f"; {len(wrong) - 1} more: {others}" if others else "")
        where = f"step {first.step} {first.module} {first.kind}"
        return failed(name, f"{first.dtype} ({first.tensors} tensors)", limit, where, detail)
    for gap, where in _ledger_gaps(record):
        return unable(name, gap, where)
    modules = len({row.module for row in rows})
    return passed(name, f"{sum(row.tensors for row in rows):,} tensors of {modules} modules", limit)


def _expected(row: DtypeRow, plan: Any) -> str:
    trainer = getattr(plan.config, "trainer", None)
    if row.kind == "gradient" and trainer is not None and trainer.accumulate_grad_batches > 1:
        return "float32"  # gradients of several micro-batches add up in it
    return EXPECTED_OF.get(row.module.rpartition(".")[2], EXPECTED).get(row.kind, "no such kind")


def _ledger_gaps(record: Record) -> Iterator[tuple[str, str]]:
    """(what was not looked at, where)."""
    of: dict[str, set[str]] = {kind: set() for kind in EXPECTED}
    for row in record.dtypes:
        if row.tensors > 0:
            of[row.kind].add(row.module)
    for kind in EXPECTED:
        # A model without experts has no buffer.
        if not of[kind] and kind != "buffer":
            yield f"measured nothing: no {kind} was seen", ""
    for kind in ("master", "moment"):
        for module in sorted(of["parameter"] - of[kind]):
            yield f"its parameters have no {kind}", module
    for gemm in record.coverage:
        if gemm.gemm == "output" and gemm.quantized_calls + gemm.bf16_calls and gemm.module not in of["activation"]:
            yield "ran, but its output was not seen", gemm.module
    if record.dtype_steps < len(record.steps) or not record.steps:
        yield f"looked at {record.dtype_steps} of {len(record.steps)} steps", ""


def neutrality(record: Record, plan: Any, limits: Any) -> Finding:
    """Callbacks change nothing: no state differs when their hooks have run, and losses are those of a run without."""
    name, looks = "neutrality", record.neutral_looks
    limit = "no state changed by a hook, and losses equal to the last bit with callbacks and without"
    pairs = list(zip(record.watched_losses, record.unwatched_losses, strict=False))
    apart = [step for step, (watched, unwatched) in enumerate(pairs) if watched != unwatched]
    changes = f"{len(record.neutral)} changes in {sum(looks.values())} hooks"
    measured = f"{changes}, {len(apart)} of {len(pairs)} losses differ"
    if record.neutral:
        row = record.neutral[0]
        others = dict.fromkeys(row.name for row in record.neutral[1:4])
        return failed(name, measured, limit, f"step {row.step} {row.hook}: {row.name}", "; ".join(others))
    if apart and any(row.kind == "rerun" and not row.equal for row in record.bits):
        return unable(name, "the same steps run twice differ, so losses cannot be compared", f"step {apart[0]} loss")
    if apart:
        watched, unwatched = pairs[apart[0]]
        detail = f"{watched} watched, {unwatched} without callbacks"
        return failed(name, measured, limit, f"step {apart[0]} loss", detail)
    if not pairs or len(pairs) < min(LEAST_LOSSES, len(record.steps)):
        return unable(name, f"{len(pairs)} losses compared with those of a run without callbacks")
    for hook in HOOKS:
        if looks.get(hook, 0) < max(1, len(record.steps)):
            return unable(name, f"state compared in {looks.get(hook, 0)} of {len(record.steps)} steps", hook)
    return passed(name, measured, limit)
