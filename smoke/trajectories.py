"""Trajectories: several optimizer steps from one snapshot, run again and compared to the last bit.

A snapshot holds everything that a step reads and changes: parameters, buffers (router bias and load, amax histories,
scales), optimizer state with its float32 masters, and the random states. A trajectory keeps, for each step, the loss,
every gradient (before the optimizer uses it) and every parameter and buffer after the update. What runs a step is
handed in, so this file knows neither model nor precision.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smoke.numerics import first_mismatch
from smoke.record import BitRow

Slices = dict[str, list[tuple[str, int, int]]]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@dataclass
class Snapshot:
    """A copy of all state of a training step."""

    tensors: dict[str, Tensor]
    optimizer: dict[str, Any]
    random: tuple[Any, ...]

    @classmethod
    def take(cls, module: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
        tensors = {name: tensor.detach().clone() for name, tensor in _tensors(module).items()}
        return cls(tensors, copy.deepcopy(optimizer.state_dict()), random_states())

    @torch.no_grad()
    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put everything back into the same Parameter objects; gradients are dropped."""
        for name, tensor in _tensors(module).items():
            tensor.copy_(self.tensors[name])
        optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        for parameter in module.parameters():
            parameter.grad = None
        set_random_states(self.random)


def random_states() -> tuple[Any, ...]:
    """Random states of torch (CPU and every CUDA device in use), Python and NumPy."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def set_random_states(states: tuple[Any, ...]) -> None:
    """Set what ``random_states`` returned."""
    cpu, cuda, python, numpy = states
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    np.random.set_state(numpy)


@contextlib.contextmanager
def untouched_random_states() -> Iterator[None]:
    """Whatever is drawn inside leaves the random states as they were."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """The scope of every bitwise comparison: deterministic algorithms, flags restored at the end."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its attribute is made at run time
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


@dataclass
class Trajectory:
    """Losses, gradients and states of consecutive steps (detached copies)."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    error: str = ""
    """Why the trajectory stopped early; empty when it did not."""


def follow(
    module: nn.Module,
    step: Callable[[Any, Callable[[], None]], Tensor],
    batches: Iterable[Any],
    expected_errors: tuple[type[Exception], ...] = (),
) -> Trajectory:
    """Run ``step(batch, on_gradients)`` over the batches and keep copies of what it computed.

    An error of ``expected_errors`` ends the trajectory and is kept as its ``error``; any other is raised.
    """
    trajectory = Trajectory()
    counters: dict[str, Tensor] = {}

    def keep_gradients() -> None:
        trajectory.gradients.append(
            {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}
        )
        # A counter (the routers' load) is read and cleared by the update: afterwards no difference is left in it.
        counters.update((f"{name} before the update", b.detach().clone()) for name, b in module.named_buffers())

    for batch in batches:
        try:
            loss = step(batch, keep_gradients)
        except expected_errors as error:
            trajectory.error = f"{type(error).__name__}: {error}"
            break
        trajectory.losses.append(loss.detach().clone())
        trajectory.states.append({name: t.detach().clone() for name, t in _tensors(module).items()} | counters)
    return trajectory


def compare(kind: str, left: Trajectory, right: Trajectory, slices: Slices | None = None) -> list[BitRow]:
    """Compare two trajectories bit by bit: a row for every loss, gradient and weight of every step."""
    rows: list[BitRow] = []
    for step in range(max(len(left.losses), len(right.losses))):
        rows += _compare_tensors(kind, step, "loss", _loss(left, step), _loss(right, step), {})
        rows += _compare_tensors(kind, step, "gradient", _at(left.gradients, step), _at(right.gradients, step), slices)
        rows += _compare_tensors(kind, step, "weight", _at(left.states, step), _at(right.states, step), slices)
    for side in (left, right):
        if side.error:
            rows.append(BitRow(kind=kind, step=len(side.losses), quantity="loss", name=side.error, equal=False))
    return rows


def _at(items: Sequence[dict[str, Tensor]], step: int) -> dict[str, Tensor]:
    return items[step] if step < len(items) else {}


def _loss(trajectory: Trajectory, step: int) -> dict[str, Tensor]:
    return {"": trajectory.losses[step]} if step < len(trajectory.losses) else {}


def _compare_tensors(
    kind: str, step: int, quantity: str, left: dict[str, Tensor], right: dict[str, Tensor], slices: Slices | None
) -> Iterator[BitRow]:
    for name in {**left, **right}:
        a, b = left.get(name), right.get(name)
        common: dict[str, Any] = {"kind": kind, "step": step, "quantity": quantity, "name": name}
        if a is None or b is None:
            yield BitRow(
                **common, equal=False, left_hex="absent" if a is None else "", right_hex="absent" if b is None else ""
            )
            continue
        found = first_mismatch(a, b)
        if found is None:
            yield BitRow(**common, equal=True, elements=a.numel())
            continue
        index, left_value, right_value, count = found
        yield BitRow(
            **common,
            equal=False,
            slice=_slice_of(name, index, slices or {}),
            first_index=tuple(index),
            left_hex=left_value,
            right_hex=right_value,
            mismatches=count,
            elements=a.numel(),
        )


def _slice_of(name: str, index: Sequence[int], slices: Slices) -> str:
    for label, start, stop in slices.get(name, []):
        if index and start <= index[0] < stop:
            return label
    return ""
