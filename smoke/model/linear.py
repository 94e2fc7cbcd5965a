"""The leaves that own every GEMM: Linear, GroupedLinear (experts) and HeadwiseLinear (absorbed per-head products).

A leaf holds its Parameters and multiplies; it knows nothing of precision. A precision plug-in replaces a leaf by a
subclass that adopts the same Parameter objects under the same names. All three GEMMs of a leaf (output, grad_input,
grad_weight) go through ``smoke.kernels.support.product``. None of the leaves has a bias, as in DeepSeek-V3.

Shape letters: T tokens, I input features, O output features, N heads (or groups).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smoke.kernels.support import grouped_product, product, widened


class _Product(torch.autograd.Function):
    """y = x w^T in the operands' own dtype, batched or not; saves x and w only."""

    @staticmethod
    def forward(ctx, x_TI: Tensor, w_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, w_OI)
        return product(x_TI, w_OI.mT)

    @staticmethod
    def backward(ctx, dy_TO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TI, w_OI = ctx.saved_tensors
        wide_TO = widened(dy_TO)
        dx_TI = product(wide_TO, w_OI, out_dtype=dy_TO.dtype) if ctx.needs_input_grad[0] else None
        dw_OI = product(wide_TO.mT, x_TI, out_dtype=w_OI.dtype) if ctx.needs_input_grad[1] else None
        return dx_TI, dw_OI


class _GroupedProduct(torch.autograd.Function):
    """``_Product`` of consecutive rows with a weight each; saves x and the weights only."""

    @staticmethod
    def forward(ctx, x_PI: Tensor, rows: list[int], *w_OI: Tensor) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(x_PI, *w_OI)
        return grouped_product(x_PI, [w.mT for w in w_OI], rows)

    @staticmethod
    def backward(ctx, dy_PO: Tensor) -> tuple[Tensor | None, ...]:
        x_PI, *w_OI = ctx.saved_tensors
        wide_PO, wide_PI = widened(dy_PO), widened(x_PI)
        dx_PI = grouped_product(wide_PO, w_OI, ctx.rows, out_dtype=dy_PO.dtype) if ctx.needs_input_grad[0] else None
        groups = zip(wide_PO.split(ctx.rows), wide_PI.split(ctx.rows), w_OI, ctx.needs_input_grad[2:], strict=True)
        dw_OI = [product(dy.mT, x, out_dtype=w.dtype) if needed else None for dy, x, w, needed in groups]
        return dx_PI, None, *dw_OI


class Linear(nn.Module):
    """``y[..., O] = x[..., I] @ weight[O, I]^T``."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype = torch.bfloat16, device=None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O], same dtype as x."""
        y_TO = self.multiply(x.reshape(-1, self.in_features))
        return y_TO.reshape(*x.shape[:-1], self.out_features)

    def multiply(self, x_TI: Tensor) -> Tensor:
        """The product on a matrix; what a precision leaf overrides."""
        return _Product.apply(x_TI, self.weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class GroupedLinear(nn.Module):
    """One weight for each group; consecutive rows of x belong to consecutive groups (Transformer Engine's names)."""

    def __init__(
        self, num_groups: int, in_features: int, out_features: int, *, dtype: torch.dtype = torch.bfloat16, device=None
    ):
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        for group in range(num_groups):
            weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
            self.register_parameter(f"weight{group}", weight)

    def weights(self) -> list[Tensor]:
        """The groups' weights, each [O, I], in order."""
        return [getattr(self, f"weight{group}") for group in range(self.num_groups)]

    def forward(self, x_TI: Tensor, rows: list[int]) -> Tensor:
        """x [T, I], ``rows`` tokens of each group (sum T, zeros allowed) -> [T, O].

        A group without tokens takes no part: its weight gets no gradient.
        """
        used = [group for group, count in enumerate(rows) if count]
        if not used:
            return x_TI.new_empty(0, self.out_features)
        return self.multiply(x_TI, [rows[group] for group in used], used)

    def multiply(self, x_TI: Tensor, rows: list[int], groups: list[int]) -> Tensor:
        """The products of groups that have rows; what a precision leaf overrides."""
        weights = self.weights()
        return _GroupedProduct.apply(x_TI, rows, *(weights[group] for group in groups))

    def extra_repr(self) -> str:
        return f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"


class HeadwiseLinear(nn.Module):
    """``y[t, n] = x[t, n] @ w[n]^T`` with a weight that belongs to another leaf (the absorbed K-up and V-up)."""

    def __init__(self, num_heads: int, in_features: int, out_features: int):
        super().__init__()
        self.num_heads, self.in_features, self.out_features = num_heads, in_features, out_features

    def forward(self, x_TNI: Tensor, w_NOI: Tensor) -> Tensor:
        """x [T, N, I], w [N, O, I] -> [T, N, O]; w may be a view (also transposed) of a Parameter."""
        return _Product.apply(x_TNI.transpose(0, 1), w_NOI).transpose(0, 1)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, in_features={self.in_features}, out_features={self.out_features}"
