"""In which type every module computes: parameters, gradients, masters, optimizer moments, buffers and activations.

A type that slips is silent: BF16 masters drop small updates, a router in BF16 sends tokens elsewhere, a float32
activation makes everything behind it slow. The ledger counts, for each module and kind of tensor, the types it met, in
the order in which it met them; what they should be is for the check to say.

    parameter, buffer    when training starts and after every step
    input, activation    at every forward of every module, replays included: its first argument, and what it returns
    loss                 numbers without dimensions that a module returns, and what backward starts from
    gradient             of the parameters, before the optimizer takes them
    master, moment       what the optimizer keeps for each parameter, as the caller reads it off the optimizer

Gradients of activations are not listed: autograd casts each to the type of its activation. Limits: what a module
computes inside, between its inputs and outputs, is not seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from smoke.callbacks.common import rows_to_state, trainable
from smoke.record import DtypeRow

OptimizerStates = Callable[[Any], Iterable[tuple[Tensor, str, Tensor]]]


class DtypeMeter:
    """Counts tensors by module, kind and type."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, str], list[int]] = {}
        """(module, kind, type) -> [first step, tensors]."""

    def see(self, step: int, module: str, kind: str, tensor: Tensor) -> None:
        """Note one tensor; integers and booleans are no arithmetic of interest."""
        if tensor.is_floating_point():
            key = (module, kind, _NAMES.get(tensor.dtype) or str(tensor.dtype))
            self.counts.setdefault(key, [step, 0])[1] += 1

    def rows(self) -> list[DtypeRow]:
        """In the order of the first sight."""
        return [
            DtypeRow(module=module, kind=kind, dtype=dtype, step=step, tensors=tensors)
            for (module, kind, dtype), (step, tensors) in self.counts.items()
        ]


_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (torch.bfloat16, torch.float16, torch.float32)}


def moments(optimizer: Any) -> Iterator[tuple[Tensor, str, Tensor]]:
    """What a plain ``torch.optim`` optimizer keeps for its parameters; it has no masters."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor):
                yield parameter, "moment", value


class DtypeLedger(lightning.Callback):
    """Fills ``self.meter``; ``rows()`` reads it.

    Args:
        states: yields (parameter, kind, tensor) for everything that an optimizer keeps; kind is master or moment.
        prefix: taken off the names of modules.
    """

    def __init__(self, states: OptimizerStates = moments, *, prefix: str = ""):
        self.meter = DtypeMeter()
        self.steps = 0
        """Optimizer steps that were looked at."""
        self._states, self._prefix = states, prefix
        self._handles: list[Any] = []
        self._step, self._watching = 0, False
        self._optimizer: Any = None

    def rows(self) -> list[DtypeRow]:
        """One for each module, kind and type met."""
        return self.meter.rows()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step
        if not self.steps:  # a resumed run saw them at the end of the step before
            self._see_parameters(pl_module)
        for name, module in pl_module.named_modules():
            if module is not pl_module:
                hook = partial(self._see_forward, name.removeprefix(self._prefix))
                self._handles.append(module.register_forward_hook(hook))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step, self._watching = trainer.global_step, True

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.meter.see(self._step, "training step", "loss", loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._optimizer = optimizer
        for name, parameter in trainable(pl_module, self._prefix):
            if parameter.grad is not None:
                self.meter.see(self._step, name.rpartition(".")[0], "gradient", parameter.grad)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._watching = False
        if self._optimizer is not None:
            self._see_parameters(pl_module)
            names = {id(parameter): name.rpartition(".")[0] for name, parameter in trainable(pl_module, self._prefix)}
            for parameter, kind, tensor in self._states(self._optimizer):
                self.meter.see(self._step, names.get(id(parameter), "no parameter of the module"), kind, tensor)
            self._optimizer, self.steps = None, self.steps + 1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._watching = [], False

    def _see_parameters(self, pl_module: nn.Module) -> None:
        for kind, named in (("parameter", pl_module.named_parameters()), ("buffer", pl_module.named_buffers())):
            for name, tensor in named:
                self.meter.see(self._step, name.removeprefix(self._prefix).rpartition(".")[0], kind, tensor)

    def _see_forward(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._watching:
            if args and isinstance(args[0], Tensor):
                self.meter.see(self._step, name, "input", args[0])
            for tensor in _tensors(output):
                self.meter.see(self._step, name, "activation" if tensor.dim() else "loss", tensor)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": rows_to_state(self.rows()), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rows = [DtypeRow(**row) for row in state_dict["rows"]]
        self.meter.counts = {(row.module, row.kind, row.dtype): [row.step, row.tensors] for row in rows}
        self.steps = state_dict["steps"]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of what a module returned: alone, or in tuples, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))
