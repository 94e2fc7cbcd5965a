"""Looks for NaN and infinity where they can still be seen: before quantization.

An NVFP4 cast turns a NaN into +-6, so the loss stays finite while something upstream is broken. So besides the loss,
every gradient and every weight, this callback looks at what enters each leaf that quantizes (its inputs in forward, the
gradient of its output in backward).

Cheap on purpose: one min-and-max reduction for each tensor (both propagate NaN), kept on the device and read together
once a step; only an offender that is still alive is counted element by element. Forward hooks and tensor hooks only
read: no gradient, graph or saved tensor changes, and recomputed regions see the same tensors.

Limits: a leaf called again while a region is replayed is looked at twice, and the inputs of a leaf called outside its
``__call__`` are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from smoke.callbacks.common import rows_to_state, trainable
from smoke.record import FiniteRow

_LOOKED_AT = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def holders(module: nn.Module) -> dict[str, nn.Module]:
    """Every module that holds parameters of its own: what quantizes a weight does."""
    return {
        name: inner for name, inner in module.named_modules() if next(inner.parameters(recurse=False), None) is not None
    }


class FiniteMeter:
    """Collects the extremes of tensors and turns those that are not finite into rows."""

    def __init__(self) -> None:
        self.rows: list[FiniteRow] = []
        self.looked = 0
        self.kinds: set[str] = set()
        """Kinds of tensors looked at so far."""
        self._entries: list[tuple[str, str, Tensor | None]] = []
        self._extremes: list[Tensor] = []

    @torch.no_grad()
    def look(self, kind: str, name: str, tensor: Tensor, *, keep: bool) -> None:
        """Note one tensor. ``keep`` holds it until ``flush``, which can then count its elements."""
        if tensor.dtype in _LOOKED_AT and tensor.numel():
            self.kinds.add(kind)
            self._entries.append((kind, name, tensor.detach() if keep else None))
            self._extremes += torch.aminmax(tensor.detach())

    def flush(self, step: int) -> list[FiniteRow]:
        """Read what was noted since the last flush; returns, and keeps, a row for each offender."""
        entries, extremes = self._entries, self._extremes
        self._entries, self._extremes = [], []
        if not entries:
            return []
        self.looked += len(entries)
        values = torch.stack([value.double() for value in extremes]).reshape(-1, 2)
        found = []
        if not bool(values.isfinite().all()):
            for (kind, name, tensor), pair in zip(entries, values, strict=True):
                judged = pair if tensor is None else tensor
                if not bool(judged.isfinite().all()):
                    nan, inf = int(judged.isnan().sum()), int(judged.isinf().sum())
                    if tensor is None:
                        nan, inf = min(nan, 1), min(inf, 1)
                    found.append(FiniteRow(step=step, kind=kind, name=name, nan=nan, inf=inf))
        self.rows += found
        return found


class Finite(lightning.Callback):
    """Keeps a row for each tensor that is not finite in ``self.rows``.

    Args:
        leaves: the modules whose inputs and output gradients are looked at, by name, read when training starts (after
            leaves were swapped); by default every module that holds parameters of its own.
        stop: end training after the step in which something is red.
        prefix: taken off the names of parameters and leaves.
    """

    def __init__(
        self,
        leaves: Callable[[nn.Module], Mapping[str, nn.Module]] = holders,
        *,
        stop: bool = False,
        prefix: str = "",
    ):
        self.meter = FiniteMeter()
        self.steps = 0
        """Optimizer steps in which everything was looked at."""
        self._leaves, self._stop, self._prefix = leaves, stop, prefix
        self._handles: list[Any] = []
        self._step: int | None = None
        self._watching = False

    @property
    def rows(self) -> list[FiniteRow]:
        """Offenders so far."""
        return self.meter.rows

    @property
    def looked(self) -> int:
        """Tensors looked at so far."""
        return self.meter.looked

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for full_name, leaf in self._leaves(pl_module).items():
            name = full_name.removeprefix(self._prefix)
            self._handles.append(leaf.register_forward_pre_hook(self._input_hook(name)))
            self._handles.append(leaf.register_forward_hook(self._output_hook(name)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._remove()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._watching = True

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.meter.look("loss", "loss", loss, keep=True)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for name, parameter in trainable(pl_module, self._prefix, [optimizer]):
            if parameter.grad is not None:
                self.meter.look("gradient", name, parameter.grad, keep=True)
        self._step = trainer.global_step
        self._react(trainer, self._step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._watching = False
        if self._step is None:
            return
        for name, parameter in trainable(pl_module, self._prefix, trainer.optimizers):
            self.meter.look("weight", name, parameter, keep=True)
        self._react(trainer, self._step)
        self.steps, self._step = self.steps + 1, None

    def _react(self, trainer: Any, step: int) -> None:
        if self.meter.flush(step) and self._stop:
            trainer.should_stop = True

    def _input_hook(self, name: str) -> Callable[..., None]:
        def look_at_inputs(leaf: nn.Module, args: tuple[Any, ...]) -> None:
            if self._watching:
                for arg in args:
                    if isinstance(arg, Tensor) and not isinstance(arg, nn.Parameter):
                        self.meter.look("input", name, arg, keep=False)

        return look_at_inputs

    def _output_hook(self, name: str) -> Callable[..., None]:
        def look_at_gradient(gradient: Tensor) -> None:
            if self._watching:
                self.meter.look("output_gradient", name, gradient, keep=False)

        def watch_output(leaf: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._watching and isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(look_at_gradient)

        return watch_output

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._watching = [], False

    def state_dict(self) -> dict[str, Any]:
        counts = {"looked": self.looked, "kinds": sorted(self.meter.kinds), "steps": self.steps}
        return {"rows": rows_to_state(self.rows), **counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.meter.rows = [FiniteRow(**row) for row in state_dict["rows"]]
        self.meter.kinds = set(state_dict["kinds"])
        self.meter.looked, self.steps = state_dict["looked"], state_dict["steps"]
