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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from smoke.kernels.quantize.api import Operand, amax, operand
from smoke.kernels.quantize.spec import Direction, Spec
from smoke.kernels.support import grouped_product, product, widened
from smoke.model.linear import GroupedLinear, HeadwiseLinear, Linear
from smoke.precision.delayed import DelayedState

GEMMS = ("output", "grad_input", "grad_weight")
Scales = Sequence[Tensor | None]


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
    show_weights: Callable[[Sequence[Quantizers], Direction, _Operands, Scales], None] = lambda *operand: None
    """Told of each weight operand that is about to be multiplied: the quantizers of its groups, direction, scales."""

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

    def count(self, module: str, gemm: str, calls: int = 1, *, quantized: bool) -> None:
        forward = "replay" if self.modes and self.modes[-1].replay else "forward"
        kind = forward if gemm == "output" else "backward"
        self.calls[module, gemm, kind if quantized else f"bf16-{kind}"] += calls


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


class _Operands(NamedTuple):
    """Operands of consecutive groups of rows: all values [P, K] in one tensor, and a factor for each group."""

    values: Tensor
    factors: list[Tensor | None]


def _operands(x_PK: Tensor, rows: Sequence[int], spec: Spec, direction: Direction, scales: Scales) -> _Operands:
    """Quantize each group of rows for itself; in one go where no scale block touches two groups."""
    if len(rows) > 1 and spec.scaling.separates(rows, direction):
        return _Operands(operand(x_PK, spec, direction).values, [None] * len(rows))
    groups = zip(x_PK.split(rows), scales, strict=True)
    return _joined([operand(x_nK, spec, direction, scale=scale) for x_nK, scale in groups])


def _both(x_PK: Tensor, rows: Sequence[int], spec: Spec, scales: Scales) -> tuple[_Operands, _Operands]:
    """The row and the col operands; one and the same where the recipe has one code array or square blocks."""
    row = _operands(x_PK, rows, spec, "row", scales)
    return row, row if spec.scaling.symmetric else _operands(x_PK, rows, spec, "col", scales)


def _weights(w_OI: Sequence[Tensor], spec: Spec, direction: Direction, scales: Scales) -> _Operands:
    """The operands of one weight for each group, one below the other."""
    joined = w_OI[0] if len(w_OI) == 1 else torch.cat(list(w_OI))
    return _operands(joined, [w.shape[0] for w in w_OI], spec, direction, scales)


def _joined(parts: list[Operand]) -> _Operands:
    values = parts[0].values if len(parts) == 1 else torch.cat([part.values for part in parts])
    return _Operands(values, [part.factor for part in parts])


def _factors(a: _Operands, b: _Operands) -> list[Tensor | None]:
    return [
        None if left is None or right is None else left * right
        for left, right in zip(a.factors, b.factors, strict=True)
    ]


class _QuantizedProduct(torch.autograd.Function):
    """y = x w^T for consecutive rows of x with a weight each, with quantized operands.

    Saves x or its col operand, and the weights, as the BF16 leaf saves x and the weights.
    """

    @staticmethod
    def forward(ctx, x_PI: Tensor, rows: list[int], quantizers: list[Quantizers], *w_OI: Tensor) -> Tensor:
        q = quantizers[0]
        ctx.rows, ctx.quantizers, ctx.keeps_input = rows, quantizers, q.runtime.keeps_input(x_PI)
        ctx.x_scales, ctx.w_scales = [], []
        for group, x_nI, w in zip(quantizers, x_PI.split(rows), w_OI, strict=True):
            ctx.x_scales.append(q.runtime.forward_scale(2 * group.slot, x_nI))
            ctx.w_scales.append(q.runtime.forward_scale(2 * group.slot + 1, w))
        if ctx.keeps_input:
            x_row, saved = _operands(x_PI, rows, q.x, "row", ctx.x_scales), x_PI
        else:
            x_row, x_col = _both(x_PI, rows, q.x, ctx.x_scales)
            saved, ctx.x_factors = x_col
        w_row = _weights(w_OI, q.w, "row", ctx.w_scales)
        q.runtime.show_weights(quantizers, "row", w_row, ctx.w_scales)
        q.runtime.count(q.module, "output", len(rows), quantized=True)
        ctx.save_for_backward(saved, *w_OI)
        w_KN = [w.mT for w in w_row.values.split([w.shape[0] for w in w_OI])]
        return grouped_product(x_row.values, w_KN, rows, factors=_factors(x_row, w_row), out_dtype=x_PI.dtype)

    @staticmethod
    def backward(ctx, dy_PO: Tensor) -> tuple[Tensor | None, ...]:
        saved, *w_OI = ctx.saved_tensors
        rows, quantizers = ctx.rows, ctx.quantizers
        q: Quantizers = quantizers[0]
        scales = [
            q.runtime.backward_scale(group.slot, dy_nO)
            for group, dy_nO in zip(quantizers, dy_PO.split(rows), strict=True)
        ]
        dy_row, dy_col = _both(dy_PO, rows, q.dy, scales)
        dx_PI: Tensor | None = None
        dw_OI: list[Tensor | None] = [None] * len(rows)
        if ctx.needs_input_grad[0]:
            w_col = _weights(w_OI, q.w, "col", ctx.w_scales)
            q.runtime.show_weights(quantizers, "col", w_col, ctx.w_scales)
            q.runtime.count(q.module, "grad_input", len(rows), quantized=True)
            w_ON = w_col.values.split([w.shape[0] for w in w_OI])
            dx_PI = grouped_product(dy_row.values, w_ON, rows, factors=_factors(dy_row, w_col), out_dtype=dy_PO.dtype)
        if any(ctx.needs_input_grad[3:]):
            if ctx.keeps_input:
                x_col = _operands(saved, rows, q.x, "col", ctx.x_scales)
            else:
                x_col = _Operands(saved, ctx.x_factors)
            q.runtime.count(q.module, "grad_weight", len(rows), quantized=True)
            groups = zip(
                widened(dy_col.values).split(rows),
                widened(x_col.values).split(rows),
                _factors(dy_col, x_col),
                w_OI,
                strict=True,
            )
            dw_OI = [product(dy.mT, x, factor=factor, out_dtype=w.dtype) for dy, x, factor, w in groups]
        return dx_PI, None, None, *dw_OI


class QuantizedLinear(Linear):
    """A Linear leaf with quantized GEMMs; adopts the Parameter of the leaf it replaces."""

    def __init__(self, leaf: Linear, quantizers: Quantizers):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = leaf.in_features, leaf.out_features
        self.weight = leaf.weight
        self.quantizers = quantizers

    def multiply(self, x_TI: Tensor) -> Tensor:
        q = self.quantizers
        if q.runtime.modes:
            return _QuantizedProduct.apply(x_TI, [x_TI.shape[0]], [q], self.weight)
        q.runtime.count(q.module, "output", quantized=False)
        return super().multiply(x_TI)


class QuantizedGroupedLinear(GroupedLinear):
    """Experts with quantized GEMMs, each expert with quantizers of its own, as te.GroupedLinear has."""

    def __init__(self, leaf: GroupedLinear, quantizers: list[Quantizers]):
        torch.nn.Module.__init__(self)
        self.num_groups, self.in_features, self.out_features = leaf.num_groups, leaf.in_features, leaf.out_features
        for name, weight in leaf.named_parameters():
            self.register_parameter(name, weight)
        self.quantizers = quantizers

    def multiply(self, x_TI: Tensor, rows: list[int], groups: list[int]) -> Tensor:
        quantizers, weights = [self.quantizers[group] for group in groups], self.weights()
        q = quantizers[0]
        if q.runtime.modes:
            return _QuantizedProduct.apply(x_TI, rows, quantizers, *(weights[group] for group in groups))
        q.runtime.count(q.module, "output", len(groups), quantized=False)
        return super().multiply(x_TI, rows, groups)


class QuantizedHeadwiseLinear(HeadwiseLinear):
    """Absorbed per-head products with quantized GEMMs, each head with quantizers of its own."""

    def __init__(self, leaf: HeadwiseLinear, quantizers: list[Quantizers]):
        super().__init__(leaf.num_heads, leaf.in_features, leaf.out_features)
        self.quantizers = quantizers

    def forward(self, x_TNI: Tensor, w_NOI: Tensor) -> Tensor:
        if not self.quantizers[0].runtime.modes:
            self.quantizers[0].runtime.count(self.quantizers[0].module, "output", quantized=False)
            return super().forward(x_TNI, w_NOI)
        tokens = [x_TNI.shape[0]]
        heads = [
            _QuantizedProduct.apply(x_TNI[:, head], tokens, [q], w_NOI[head]) for head, q in enumerate(self.quantizers)
        ]
        return torch.stack(heads, dim=1)
