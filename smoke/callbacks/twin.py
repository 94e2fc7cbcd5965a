"""A reference for GradientParity, made of a second instance of the watched module.

The twin is called with the live weights of the watched module: detached aliases of them (the same storage, gradients of
their own; converted where the twin has another dtype) and clones of the buffers, through ``functional_call``. So no
hook, ``.grad`` or buffer of the watched module is touched, the twin needs no weights of its own (build it on the meta
device) and no optimizer step has to be repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from smoke.callbacks.common import trainable


class _Loss(nn.Module):
    """``loss(twin, batch)`` as a forward, which is what ``functional_call`` can call."""

    def __init__(self, twin: nn.Module, loss: Callable[[Any, Any], Tensor]):
        super().__init__()
        self.twin, self._loss = twin, loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.twin, batch)


def twin_reference(
    module: nn.Module,
    twin: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    *,
    prefix: str = "",
    replay: Callable[[Any], AbstractContextManager] | None = None,
) -> Callable[[Any, Any], dict[str, Tensor]]:
    """``reference(batch, tape)`` for GradientParity: gradients of ``loss(twin, batch)`` at the weights of ``module``.

    Args:
        module: the module that is trained.
        twin: another instance with the same parameter names and shapes, in the arithmetic to compare with.
        loss: the scalar loss of a batch, undivided, as ``training_step`` computes it; what it calls must not log.
        prefix: taken off the names of the gradients, as in ``GradientParity(prefix=)``.
        replay: context in which a tape's expert choices are imposed on the twin.

    Raises:
        ValueError: the twin is the module itself, or their parameters differ in name or shape.
    """
    _same_parameters(module, twin)
    whole = _Loss(twin, loss)

    def reference(batch: Any, tape: Any) -> dict[str, Tensor]:
        _follow_modes(module, twin)
        wanted = {name for name, _ in trainable(module)}
        dtypes = {name: parameter.dtype for name, parameter in twin.named_parameters()}
        state = {name: p.detach().to(dtypes[name]) for name, p in module.named_parameters()}
        leaves = {name: tensor.requires_grad_() for name, tensor in state.items() if name in wanted}
        known = {name for name, _ in twin.named_buffers()}
        state |= {name: b.detach().clone() for name, b in module.named_buffers() if name in known}
        imposed = contextlib.nullcontext() if tape is None or replay is None else replay(tape)
        with torch.enable_grad(), imposed:
            value = functional_call(whole, {f"twin.{name}": tensor for name, tensor in state.items()}, (batch,))
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        named = zip(leaves, gradients, strict=True)
        return {name.removeprefix(prefix): gradient for name, gradient in named if gradient is not None}

    return reference


def _same_parameters(module: nn.Module, twin: nn.Module) -> None:
    if twin is module:
        raise ValueError("the twin has to be another instance: calling the watched module would change what is watched")
    left, right = ({name: tuple(p.shape) for name, p in m.named_parameters()} for m in (module, twin))
    for name in {**left, **right}:
        if left.get(name) != right.get(name):
            shapes = f"{left.get(name, 'absent')} in the module, {right.get(name, 'absent')} in the twin"
            raise ValueError(f"the twin's parameters are not the module's: {name} is {shapes}")


def _follow_modes(module: nn.Module, twin: nn.Module) -> None:
    """Set the train or eval flag of each of the twin's modules as the watched one has it."""
    flags = {name: inner.training for name, inner in module.named_modules()}
    for name, inner in twin.named_modules():
        inner.training = flags.get(name, module.training)
