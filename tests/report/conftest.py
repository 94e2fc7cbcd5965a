"""A plan, and a record as a run of eight steps leaves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from smoke.checks import FAIL, PASS, SKIP, Finding
from smoke.config import RunConfig
from smoke.environment import Environment
from smoke.plan import Plan, resolve
from smoke.record import CoverageRow, GradientRow, LossCurves, Record, StepRow, ThroughputSummary

PARAMETERS = (
    "embedding.weight",
    "layers.0.self_attention.linear_q_up_proj.weight",
    "layers.0.mlp.linear_fc1.weight",
    "layers.1.self_attention.linear_q_up_proj.weight",
    "layers.1.mlp.experts.linear_fc1.weight0",
    "layers.1.mlp.experts.linear_fc1.weight7",
    "mtp.eh_proj.weight",
    "mtp.mtp_model_layer.self_attention.linear_q_up_proj.weight",
)
LOSSES = (5.5, 5.2, 4.9, 4.7, 4.5, 4.4, 4.3, 4.2)


@pytest.fixture
def environment() -> Environment:
    return Environment(
        python="3.11.9",
        platform="Linux-test",
        cpu_name="a CPU",
        cpu_flags=("avx2", "fma"),
        cpu_count=2,
        memory_bytes=2**34,
        packages={"torch": "2.13.0", "lightning": "2.6.5"},
    )


@pytest.fixture
def make_plan(environment: Environment) -> Callable[..., Plan]:
    """``make_plan(**options)`` over the default run with mla_up_proj recomputed."""

    def make(**options: Any) -> Plan:
        values: dict[str, Any] = {"recompute": ("mla_up_proj",), "device": "cpu", "steps": 8} | options
        return resolve(RunConfig(**values), environment)

    return make


@pytest.fixture
def findings() -> Callable[..., list[Finding]]:
    """``findings(plan, **statuses)``: every check of the plan, required ones PASS unless said otherwise."""

    def make(plan: Plan, **statuses: str) -> list[Finding]:
        found = [
            Finding(
                name=name,
                status=statuses.get(name, PASS),
                measured="0.0312, slice 0.0518",
                limit="<= 0.09, slice <= 0.15",
                where="layers.1.self_attention.linear_q_up_proj.weight, head 3, step 0",
                detail="2 rows over" if statuses.get(name) == FAIL else "",
            )
            for name in plan.required
        ]
        return found + [Finding(name=name, status=SKIP, detail=reason) for name, reason in plan.skipped.items()]

    return make


@pytest.fixture
def record() -> Record:
    return Record(
        steps=[_step(i, loss) for i, loss in enumerate(LOSSES)],
        gradients=[_gradient(i, name) for i, name in enumerate(PARAMETERS)],
        coverage=[_coverage(name) for name in PARAMETERS[1:3]],
        curves=LossCurves(
            run=LOSSES,
            twin=tuple(loss - 0.01 * i for i, loss in enumerate(LOSSES)),
            perturbed=(tuple(loss - 0.002 for loss in LOSSES), tuple(loss + 0.001 for loss in LOSSES)),
            other_seed=tuple(loss + 0.2 for loss in LOSSES),
        ),
        throughput=_times(),
        peak_gib=0.61,
        held_mib=11.25,
    )


def _step(index: int, loss: float) -> StepRow:
    return StepRow(
        step=index,
        loss=loss,
        loss_hex=loss.hex(),
        grad_norm=1.5,
        tokens=1020,
        padded_tokens=1024,
        step_time_ms=500.0,
        forward_ms=200.0,
        backward_ms=250.0,
        batch_sha256=f"{index:064x}",
    )


def _gradient(index: int, name: str) -> GradientRow:
    return GradientRow(
        step=0,
        routing="replayed",
        parameter=name,
        slice="head 3" if "q_up" in name else "",
        quantized="embedding" not in name,
        relative_error=0.01 * (index + 1),
        cosine=0.999,
        norm=1.0,
        reference_norm=1.0,
    )


def _coverage(name: str) -> CoverageRow:
    return CoverageRow(
        module=name.removesuffix(".weight"),
        gemm="output",
        format="e4m3 x e4m3",
        planned=True,
        reason="the recipe",
        quantized_calls=8,
        bf16_calls=0,
        replay_quantized_calls=8,
        replay_bf16_calls=0,
    )


def _times() -> ThroughputSummary:
    return ThroughputSummary(
        warmup_steps=2,
        measured_steps=6,
        tokens=6120,
        tokens_per_s=2040.0,
        step_time_ms_p50=500.0,
        step_time_ms_p95=510.0,
        forward_ms_p50=200.0,
        backward_ms_p50=250.0,
        step_time_sum_ms=3000.0,
        wall_ms=3100.0,
        excluded_ms=100.0,
        label="emulation",
    )
