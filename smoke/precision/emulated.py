"""Emulated leaves: quantize both operands of each GEMM, multiply the dequantized values exactly, round once.

    output      = x row  . w row       activations and weights, reduced over K
    grad_input  = dy row . w col       reduced over N
    grad_weight = dy col . x col       reduced over T

Every operand is quantized from its high-precision source. A leaf keeps the x col operand for backward, or the input
itself where a recompute region brings it back; the weight is quantized again in backward with the scale of the forward.
``Runtime`` is what autocast is for the real thing: outside of it a leaf multiplies in BF16, as Transformer Engine's
modules do, and it hands recompute regions their two contexts.

Shape letters: T tokens, I input features, O output features, N heads.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smoke.kernels.quantize.api import Operand, amax, both, operand
from smoke.kernels.quantize.spec import Spec
from smoke.kernels.support import product
from smoke.model.linear import GroupedLinear, HeadwiseLinear, Linear
from smoke.precision.delayed import DelayedState

GEMMS = ("output", "grad_input", "grad_weight")


@dataclass
class _Mode:
    """What leaves do now: quantize, with a tape of scales to write (first pass) or to read (replay)."""

    replay: bool = False
    tape: list[Tensor] | None = None
    position: int = 0


@dataclass
class Runtime:
    """The emulation's autocast, its delayed-scaling state and the count of GEMMs that really ran."""

    forward_state: DelayedState | None = None
    backward_state: DelayedState | None = None
    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(module, gemm, pass) -> count; pass is forward, backward or replay, after ``bf16-`` if not quantized."""
    modes: list[_Mode] = field(default_factory=list)
    keeps_input: Callable[[Tensor], bool] = lambda x: False
    """Whether a recompute region brings this tensor back (the model's ``Recompute.is_discarded``)."""

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Quantize inside; the outermost exit with gradients enabled updates the delayed scales."""
        updates = torch.is_grad_enabled() and not self.modes
        if updates and self.backward_state is not None:
            self.backward_state.update()
        with self._mode(_Mode()):
            yield
        if updates and self.forward_state is not None:
            self.forward_state.update()

    def recompute_contexts(self) -> tuple[AbstractContextManager, Callable[[], AbstractContextManager]]:
        """Contexts of a recompute region: the first pass records the scales it used, a replay uses them again."""
        if not self.modes:
            return contextlib.nullcontext(), contextlib.nullcontext
        tape: list[Tensor] = []
        return self._mode(_Mode(tape=tape)), lambda: self._mode(_Mode(replay=True, tape=tape))

    @contextlib.contextmanager
    def _mode(self, mode: _Mode) -> Iterator[None]:
        self.modes.append(mode)
        try:
            yield
        finally:
            self.modes.pop()

    def forward_scale(self, slot: int, x: Tensor) -> Tensor | None:
        """Scale of a forward slot for this call (None for stateless recipes); its amax is recorded, once."""
        if self.forward_state is None:
            return None
        mode = self.modes[-1]
        if mode.replay:
            assert mode.tape is not None
            mode.position += 1
            return mode.tape[mode.position - 1]
        scale = self.forward_state.scale[slot].clone()
        self.forward_state.record(slot, amax(x))
        if mode.tape is not None:
            mode.tape.append(scale)
        return scale

    def backward_scale(self, slot: int, dy: Tensor) -> Tensor | None:
        """Scale of an output gradient's slot for this call; its amax is recorded."""
        if self.backward_state is None:
            return None
        scale = self.backward_state.scale[slot].clone()
        self.backward_state.record(slot, amax(dy))
        return scale

    def count(self, module: str, gemm: str, *, quantized: bool) -> None:
        forward = "replay" if self.modes and self.modes[-1].replay else "forward"
        kind = forward if gemm == "output" else "backward"
        self.calls[module, gemm, kind if quantized else f"bf16-{kind}"] += 1


@dataclass(frozen=True)
class Quantizers:
    """Operand specs of one leaf (of one group of it), and its slots in the delayed-scaling states."""

    runtime: Runtime
    module: str
    x: Spec
    w: Spec
    dy: Spec
    slot: int = -1
    """Forward slots are 2 * slot (x) and 2 * slot + 1 (w); the backward slot is slot."""


class _QuantizedProduct(torch.autograd.Function):
    """y = x w^T with quantized operands; saves (x or its col operand, w), as the BF16 leaf saves (x, w)."""

    @staticmethod
    def forward(ctx, x_TI: Tensor, w_OI: Tensor, q: Quantizers) -> Tensor:
        runtime = q.runtime
        ctx.q, ctx.keeps_input = q, runtime.keeps_input(x_TI)
        ctx.x_scale, ctx.w_scale = runtime.forward_scale(2 * q.slot, x_TI), runtime.forward_scale(2 * q.slot + 1, w_OI)
        if ctx.keeps_input:
            x_row, saved = operand(x_TI, q.x, "row", scale=ctx.x_scale), x_TI
        else:
            x_row, x_col = both(x_TI, q.x, scale=ctx.x_scale)
            saved, ctx.x_factor = x_col.values, x_col.factor
        w_row = operand(w_OI, q.w, "row", scale=ctx.w_scale)
        runtime.count(q.module, "output", quantized=True)
        ctx.save_for_backward(saved, w_OI)
        return product(x_row.values, w_row.values.mT, factor=_factor(x_row, w_row), out_dtype=x_TI.dtype)

    @staticmethod
    def backward(ctx, dy_TO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        saved, w_OI = ctx.saved_tensors
        q: Quantizers = ctx.q
        dy_row, dy_col = both(dy_TO, q.dy, scale=q.runtime.backward_scale(q.slot, dy_TO))
        dx_TI = dw_OI = None
        if ctx.needs_input_grad[0]:
            w_col = operand(w_OI, q.w, "col", scale=ctx.w_scale)
            q.runtime.count(q.module, "grad_input", quantized=True)
            dx_TI = product(dy_row.values, w_col.values, factor=_factor(dy_row, w_col), out_dtype=dy_TO.dtype)
        if ctx.needs_input_grad[1]:
            x_col = operand(saved, q.x, "col", scale=ctx.x_scale) if ctx.keeps_input else Operand(saved, ctx.x_factor)
            q.runtime.count(q.module, "grad_weight", quantized=True)
            dw_OI = product(dy_col.values.mT, x_col.values, factor=_factor(dy_col, x_col), out_dtype=w_OI.dtype)
        return dx_TI, dw_OI, None


def _factor(a: Operand, b: Operand) -> Tensor | None:
    return None if a.factor is None or b.factor is None else a.factor * b.factor


def _quantized_or_bf16(x_TI: Tensor, w_OI: Tensor, q: Quantizers, bf16: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    if q.runtime.modes:
        return _QuantizedProduct.apply(x_TI, w_OI, q)
    q.runtime.count(q.module, "output", quantized=False)
    return bf16(x_TI, w_OI)


class QuantizedLinear(Linear):
    """A Linear leaf with quantized GEMMs; adopts the Parameter of the leaf it replaces."""

    def __init__(self, leaf: Linear, quantizers: Quantizers):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = leaf.in_features, leaf.out_features
        self.weight = leaf.weight
        self.quantizers = quantizers

    def multiply(self, x_TI: Tensor) -> Tensor:
        return _quantized_or_bf16(x_TI, self.weight, self.quantizers, lambda x, _: Linear.multiply(self, x))


class QuantizedGroupedLinear(GroupedLinear):
    """Experts with quantized GEMMs, each expert with quantizers of its own, as te.GroupedLinear has."""

    def __init__(self, leaf: GroupedLinear, quantizers: list[Quantizers]):
        torch.nn.Module.__init__(self)
        self.num_groups, self.in_features, self.out_features = leaf.num_groups, leaf.in_features, leaf.out_features
        for name, weight in leaf.named_parameters():
            self.register_parameter(name, weight)
        self.quantizers = quantizers

    def multiply(self, x_tI: Tensor, group: int) -> Tensor:
        return _quantized_or_bf16(
            x_tI,
            getattr(self, f"weight{group}"),
            self.quantizers[group],
            lambda x, _: GroupedLinear.multiply(self, x, group),
        )


class QuantizedHeadwiseLinear(HeadwiseLinear):
    """Absorbed per-head products with quantized GEMMs, each head with quantizers of its own."""

    def __init__(self, leaf: HeadwiseLinear, quantizers: list[Quantizers]):
        super().__init__(leaf.num_heads, leaf.in_features, leaf.out_features)
        self.quantizers = quantizers

    def forward(self, x_TNI: Tensor, w_NOI: Tensor) -> Tensor:
        if not self.quantizers[0].runtime.modes:
            self.quantizers[0].runtime.count(self.quantizers[0].module, "output", quantized=False)
            return super().forward(x_TNI, w_NOI)
        heads = [_QuantizedProduct.apply(x_TNI[:, head], w_NOI[head], q) for head, q in enumerate(self.quantizers)]
        return torch.stack(heads, dim=1)
