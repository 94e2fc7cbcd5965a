"""A sound record of a ten-step mxfp8 run with recompute, its plan, and a way to spoil rows."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from smoke.checks import CHECKS, Finding, judge
from smoke.checks.ledgers import HOOKS
from smoke.checks.steps import PARTS
from smoke.record import (
    AccumulationRow,
    AttentionRow,
    BitRow,
    CoverageRow,
    DtypeRow,
    FreshnessRow,
    GradientRow,
    LossCurves,
    MemoryRow,
    PreflightRow,
    PresenceRow,
    QuantizerRow,
    Record,
    ResumeRow,
    RopeRow,
    StepRow,
    ThroughputSummary,
    TwinRow,
)
from smoke.record.baseline import BaselineRows, CostRow

STEPS, WARMUP = 10, 2
ATTENTION = "layers.0.self_attention"
QUANTIZED = (f"{ATTENTION}.linear_q_up_proj", f"{ATTENTION}.linear_proj", "layers.0.mlp.linear_fc1")
PARAMETERS = (("a.weight", True, 0.05), ("b.weight", True, 0.04), ("norm.weight", False, 0.03))
HOLDER = f"{ATTENTION}.linear_kv_up_proj"


def make_limits() -> SimpleNamespace:
    return SimpleNamespace(
        gradient_error_max=0.1,
        gradient_error_slice_max=0.2,
        gradient_error_median_max=0.3,
        gradient_error_free_max=0.5,
        gradient_error_min=0.01,
        loss_gap_max=0.01,
    )


def make_plan(precision: str = "mxfp8", **options: Any) -> SimpleNamespace:
    config = SimpleNamespace(
        steps=STEPS,
        recompute=("mla_up_proj", "mlp"),
        model=SimpleNamespace(attention_form="absorbed"),
        check=SimpleNamespace(gradient_parity_every=5),
        trainer=SimpleNamespace(accumulate_grad_batches=1),
    )
    plan = SimpleNamespace(
        config=config,
        recipe=SimpleNamespace(name=precision, limits=make_limits(), warmup_steps=0),
        numerics="bf16" if precision == "bf16" else "emulated",
        impl="reference",
        compared=("parameter", "slice", "free"),
        required=tuple(CHECKS),
        skipped={},
    )
    for name, value in options.items():
        setattr(plan if hasattr(plan, name) else config, name, value)
    return plan


def _coverage() -> list[CoverageRow]:
    rows = []
    for module, planned in [(m, True) for m in (*QUANTIZED, HOLDER)] + [("output_layer", False)]:
        for gemm in ("output", "grad_input", "grad_weight"):
            replayed = gemm == "output" and module in (QUANTIZED[0], QUANTIZED[2])
            rows.append(
                CoverageRow(
                    module=module,
                    gemm=gemm,
                    format="e4m3 x e4m3" if planned else "bf16",
                    planned=planned,
                    reason="the recipe quantizes it" if planned else "the output head stays in BF16",
                    quantized_calls=10 if planned and module != HOLDER else 0,
                    bf16_calls=0 if planned else 10,
                    replay_quantized_calls=10 if replayed else 0,
                    replay_bf16_calls=0,
                )
            )
    return rows


def _bits() -> list[BitRow]:
    tensors = [("loss", ""), ("gradient", "a.weight"), ("weight", "a.weight"), ("weight", "router.expert_bias")]
    return [
        BitRow(kind=kind, step=step, quantity=quantity, name=name, equal=True, elements=4)
        for kind in ("rerun", "recompute")
        for step in range(3)
        for quantity, name in tensors
    ]


def _freshness() -> list[FreshnessRow]:
    return [
        FreshnessRow(step=step, module=module, direction=direction, operands=1, elements=64, stale=0)
        for step in (1, 5)
        for module in QUANTIZED
        for direction in ("row", "col")
    ]


def _dtypes() -> list[DtypeRow]:
    modules = [(name, "bfloat16") for name in (*QUANTIZED, HOLDER, "output_layer")] + [
        ("layers.1.mlp.router", "float32")
    ]
    kinds = {"input": "bfloat16", "master": "float32", "moment": "float32"}
    rows = [
        DtypeRow(module=module, kind=kind, dtype=kinds.get(kind, dtype), step=0, tensors=STEPS)
        for module, dtype in modules
        for kind in ("parameter", "input", "activation", "gradient", "master", "moment")
    ]
    more = {"layers.1.mlp.router": "buffer", "training step": "loss"}
    return rows + [DtypeRow(module=m, kind=k, dtype="float32", step=0, tensors=STEPS) for m, k in more.items()]


def _gradients() -> list[GradientRow]:
    rows = []
    for step, routing in ((0, "replayed"), (0, "free"), (5, "replayed")):
        for name, quantized, error in (
            ("a.weight", True, 0.05),
            ("b.weight", True, 0.04),
            ("norm.weight", False, 0.03),
            ("experts.weight3", True, 0.05),
        ):
            for part in ("", "head 0", "head 1") if name == "a.weight" else ("",):
                rows.append(
                    GradientRow(
                        step=step,
                        routing=routing,
                        parameter=name,
                        slice=part,
                        quantized=quantized,
                        relative_error=error,
                        cosine=0.999,
                        norm=1.0,
                        reference_norm=1.0,
                    )  # fmt: skip
                )
    return rows


def _steps() -> list[StepRow]:
    losses = [5.6 - 0.1 * step for step in range(STEPS)]
    return [
        StepRow(
            step=step, loss=loss, loss_hex=loss.hex(), grad_norm=1.0, tokens=1020, padded_tokens=1024,
            step_time_ms=500.0 if step < WARMUP else 100.0 + step, forward_ms=30.0 + step, backward_ms=60.0,
            batch_sha256=f"{step:064x}",
        )
        for step, loss in enumerate(losses)
    ]  # fmt: skip


def _throughput() -> ThroughputSummary:
    total = sum(100.0 + step for step in range(WARMUP, STEPS))
    return ThroughputSummary(
        warmup_steps=WARMUP, measured_steps=STEPS - WARMUP, tokens=8 * 1020, tokens_per_s=8 * 1020 / total * 1e3,
        step_time_ms_p50=105.5, step_time_ms_p95=108.65, forward_ms_p50=35.5, backward_ms_p50=60.0,
        step_time_sum_ms=total, wall_ms=total + 700.0, excluded_ms=700.0, label="emulation",
    )  # fmt: skip


def _memory() -> list[MemoryRow]:
    held = {"held_off_bytes": 10_000, "held_on_bytes": 6_500}
    return [
        MemoryRow(
            region="mla_up_proj", inner_bytes=1_000, output_bytes=2_000, released_output_bytes=2_000,
            argument_bytes=500, replays=3, discards_outputs=True, **held,
        ),
        MemoryRow(
            region="mlp", inner_bytes=1_000, output_bytes=0, released_output_bytes=0, argument_bytes=0, replays=3,
            discards_outputs=False, **held,
        ),
    ]  # fmt: skip


def _rope() -> list[RopeRow]:
    def row(kind: str, value: float, tensor: str = "query", position: int | None = None) -> RopeRow:
        return RopeRow(kind=kind, case="reference, 3 heads", tensor=tensor, position=position, value=value)

    return [
        *(row("table", 0.5, "cos and sin", position) for position in (0, 1, 4096, 16384)),
        row("scale", 0.0, "softmax scale"),
        row("forward", 0.4, position=16384),
        row("gradient", 1.4, "gradient of k_pe", 4096),
        *(row(kind, 0.0) for kind in ("unwritten", "input", "repeat", "positions")),
    ]


def _baseline(steps: list[StepRow]) -> BaselineRows:
    return BaselineRows(
        losses=tuple((row.step, row.loss_hex) for row in steps),
        costs=(
            CostRow(quantity="tokens_per_s", value=900.0, recorded=(880.0, 905.0, 920.0, 890.0, 900.0)),
            CostRow(quantity="peak_gib", value=1.01, recorded=(1.0, 1.0, 1.02)),
            CostRow(quantity="held_mib", value=8.0, recorded=(8.0, 8.0, 8.0)),
        ),
    )


def make_record() -> Record:
    steps = _steps()
    twin = tuple(row.loss + 0.002 for row in steps)
    return Record(
        preflight=[PreflightRow(name="m", quantity="in_features", value=256, rule="multiple", required=32)],
        steps=steps,
        gradients=_gradients(),
        coverage=_coverage(),
        bits=_bits(),
        quantizer=[QuantizerRow(case="mxfp8 blocks", elements=64, mismatches=0)],
        twins=[
            *(TwinRow(kind=kind, tensor="logits", relative_error=1e-14) for kind in ("absorbed", "packed")),
            TwinRow(kind="packed_leak", tensor="sequence 0", relative_error=0.0),
        ],
        rope=_rope(),
        attention=[
            AttentionRow(
                module=f"layers.{layer}.self_attention", backend="flash", dtype="float32", columns=96, calls=10
            )
            for layer in range(2)
        ],
        saved_looked=100,
        saved_steps=STEPS,
        finite_looked=100,
        finite_steps=STEPS,
        finite_kinds=("gradient", "input", "loss", "output_gradient", "weight"),
        presence=[
            PresenceRow(parameter="a.weight", present_steps=10, nonzero_steps=10, steps=10, may_be_zero=False),
            PresenceRow(parameter="experts.weight3", present_steps=0, nonzero_steps=0, steps=0, may_be_zero=True),
        ],
        freshness=_freshness(),
        dtypes=_dtypes(),
        dtype_steps=STEPS,
        neutral_looks=dict.fromkeys(HOOKS, STEPS),
        watched_losses=tuple(row.loss_hex for row in steps),
        unwatched_losses=tuple(row.loss_hex for row in steps[:3]),
        memory=_memory(),
        accumulation=[
            AccumulationRow(name=name, micro_batches=3, relative_error=1e-15, elements=4) for name in ("", "a.weight")
        ],
        resumed=[
            ResumeRow(resumes=resumes, step=resumes, part=part, compared=10, differing=0)
            for resumes in (1, 2)
            for part in PARTS
        ],
        loss_sums=tuple(row.loss * (1 + 1e-7) for row in steps),
        curves=LossCurves(
            run=tuple(row.loss for row in steps),
            twin=twin,
            perturbed=(tuple(loss + 0.001 for loss in twin), tuple(loss - 0.0005 for loss in twin)),
            other_seed=tuple(loss + 0.1 for loss in twin),
        ),
        throughput=_throughput(),
        comparison_ms={0: 200.0, 5: 650.0},
        baseline=_baseline(steps),
        entropy_floor=1.0,
    )


class Case:
    """A record and a plan to spoil, and the findings that follow."""

    def __init__(self) -> None:
        self.record, self.plan = make_record(), make_plan()

    def spoil(self, field: str, which: Any = None, **changes: Any) -> Case:
        """Replace fields of every row of ``record.<field>`` whose fields equal those of ``which`` (a dictionary)."""
        rows, touched = getattr(self.record, field), 0
        for index, row in enumerate(rows):
            if all(getattr(row, name) == value for name, value in (which or {}).items()):
                rows[index] = dataclasses.replace(row, **changes)
                touched += 1
        assert touched, f"no row of {field} matches {which}"
        return self

    def timing(self, **changes: Any) -> Case:
        assert self.record.throughput is not None
        self.record.throughput = dataclasses.replace(self.record.throughput, **changes)
        return self

    def curves(self, **changes: Any) -> Case:
        self.record.curves = dataclasses.replace(self.record.curves, **changes)
        self.record.loss_sums = self.record.curves.run
        return self

    def findings(self) -> dict[str, Finding]:
        return {finding.name: finding for finding in judge(self.record, self.plan)}

    def only_red(self, status: str, *names: str) -> Finding:
        """The finding of the first name; asserts that the named checks have that status and all others pass."""
        findings = self.findings()
        red = {name: f.status for name, f in findings.items() if f.status not in ("PASS", "SKIP")}
        if "baseline" not in names and self.record.steps != _steps():
            red.pop("baseline", None)  # other steps are another run than the recorded one
        assert red == dict.fromkeys(names, status), {name: findings[name] for name in red}
        return findings[names[0]]
