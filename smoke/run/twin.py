"""Loss curves that need no watched model: the BF16 twin, its noise floor, and another seed for scale.

The noise floor is the twin against itself with its float32 masters moved by at most half a BF16 ulp (two draws, same
data): what any BF16 run of these sizes does to its losses without a fault. ``smoke matrix`` computes the curves once
for all rows, since they depend on model, data and optimizer only.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from smoke.module import Batch, make_optimizer, train_step
from smoke.plan import Plan
from smoke.run.session import bf16_plan, make_model, make_module
from smoke.trajectories import untouched_random_states

DRAWS = 2
OTHER_SEED_STEPS = 10
"""The other seed is printed for scale and judged by nothing, so it runs just beyond the five steps left out."""


@dataclass(frozen=True)
class TwinCurves:
    """Losses a step, in nats a token."""

    twin: tuple[float, ...]
    perturbed: tuple[tuple[float, ...], ...]
    other_seed: tuple[float, ...]


def twin_curves(plan: Plan, batches: list[Batch]) -> TwinCurves:
    """Train the twin four times over the run's batches: as it is, perturbed twice, and from another seed."""
    seed = plan.config.seed
    with untouched_random_states():
        return TwinCurves(
            twin=_losses(plan, batches, seed),
            perturbed=tuple(_losses(plan, batches, seed, draw=draw) for draw in range(DRAWS)),
            other_seed=_losses(plan, batches[:OTHER_SEED_STEPS], seed + 1),
        )


def _losses(plan: Plan, batches: list[Batch], seed: int, draw: int | None = None) -> tuple[float, ...]:
    plan = bf16_plan(plan)
    module = make_module(plan, make_model(plan, None, seed=seed))
    optimizer = make_optimizer(module.model, plan.config.train)
    if draw is not None:
        _perturb([master for _, master in optimizer.pairs()], draw)
    return tuple(float(train_step(module, optimizer, batch, contextlib.nullcontext)) for batch in batches)


@torch.no_grad()
def _perturb(masters: list[Tensor], draw: int) -> None:
    """Move each value by up to half the distance between neighbouring BF16 values of its binade."""
    generator = torch.Generator().manual_seed(7919 + draw)
    for master in masters:
        uniform = torch.rand(master.shape, generator=generator).to(master.device) * 2 - 1
        mantissa, exponent = torch.frexp(master)
        half_ulp = torch.ldexp(torch.full_like(mantissa, 2.0**-9), exponent)
        master.add_(uniform * half_ulp * (master != 0))
