"""Loss curves that need no watched model: the BF16 twin, its noise floor, and another seed for scale.

The noise floor is the twin against itself with its float32 masters moved by at most half a BF16 ulp (two draws, same
data): what any BF16 run of these sizes does to its losses without a fault. ``smoke matrix`` computes the curves once
for all rows, since they depend on model, data and optimizer only.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smoke.module import Batch, make_optimizer, train_step
from smoke.plan import Plan
from smoke.run.session import bf16_plan, make_model, make_module, windows
from smoke.trajectories import untouched_random_states

Training = Iterator[float]
DRAWS = 2
OTHER_SEED_STEPS = 8
"""The other seed is printed for scale and judged by nothing, so it runs just beyond the five steps left out."""


@dataclass(frozen=True)
class TwinCurves:
    """Losses a step, in nats a token."""

    twin: tuple[float, ...]
    perturbed: tuple[tuple[float, ...], ...]
    other_seed: tuple[float, ...]


def twin_curves(plan: Plan, batches: list[Batch]) -> TwinCurves:
    """Train the twin four times over the run's batches: as it is, perturbed twice, and from another seed."""
    seed, steps = plan.config.seed, windows(plan, batches)
    trainings = [
        _training(plan, steps, seed),
        *(_training(plan, steps, seed, draw) for draw in range(DRAWS)),
        _training(plan, steps[:OTHER_SEED_STEPS], seed + 1),
    ]
    with untouched_random_states():
        curves = _side_by_side(trainings) if plan.device == "cpu" else [list(training) for training in trainings]
    twin, *perturbed, other_seed = (tuple(curve) for curve in curves)
    return TwinCurves(twin=twin, perturbed=tuple(perturbed), other_seed=other_seed)


def _side_by_side(trainings: Sequence[Training]) -> list[list[float]]:
    """Run the trainings on the CPU in as many threads as torch has, each with one core.

    Sizes are small: one core per training wastes less than sharing every product between cores. The threads take turns
    at the trainings step by step, so that all cores are busy to the end. An exception in the waiting thread (Ctrl-C
    too) stops the others at their next step.
    """
    threads, stop = torch.get_num_threads(), threading.Event()
    curves: list[list[float]] = [[] for _ in trainings]
    waiting = queue.SimpleQueue[int]()
    for number in range(len(trainings)):
        waiting.put(number)

    def take_turns() -> None:
        torch.set_num_threads(1)  # of this thread
        with contextlib.suppress(queue.Empty):
            while not stop.is_set():
                number = waiting.get_nowait()
                loss = next(trainings[number], None)
                if loss is not None:
                    curves[number].append(loss)
                    waiting.put(number)

    workers = min(threads, len(trainings))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            for ended in [pool.submit(take_turns) for _ in range(workers)]:
                ended.result()
        finally:
            stop.set()
            torch.set_num_threads(threads)
    return curves


def _training(plan: Plan, steps: list[list[Batch]], seed: int, draw: int | None = None) -> Training:
    """Yield the loss of each step."""
    plan = bf16_plan(plan)
    module = make_module(plan, make_model(plan, None, seed=seed))
    optimizer, clip = make_optimizer(module.model, plan.config.train), plan.config.trainer.gradient_clip_val
    if draw is not None:
        _perturb([master for _, master in optimizer.pairs()], draw)
    for window in steps:
        yield float(train_step(module, optimizer, window, contextlib.nullcontext, clip=clip))


@torch.no_grad()
def _perturb(masters: list[Tensor], draw: int) -> None:
    """Move each value by up to half the distance between neighbouring BF16 values of its binade."""
    generator = torch.Generator().manual_seed(7919 + draw)
    for master in masters:
        uniform = torch.rand(master.shape, generator=generator).to(master.device) * 2 - 1
        mantissa, exponent = torch.frexp(master)
        half_ulp = torch.ldexp(torch.full_like(mantissa, 2.0**-9), exponent)
        master.add_(uniform * half_ulp * (master != 0))
