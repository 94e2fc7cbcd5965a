"""Norm, activation, dense MLP and embedding.

RMSNorm and SwiGLU are written as autograd functions so that what they keep for backward is plain: their input in its
own type (BF16), and one float32 number a row for the norm. Composed from torch operations they would keep several
float32 copies of the input, and the memory that recompute frees would be an artefact of the composition.

Both compute in float32 (float64 for float64 input) and round once, at the end. The embedding's gradient is accumulated
in float32 without atomic additions, so that it is the same in every run on every device.

Shape letters: T tokens, H width, I inner width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smoke.model.linear import Linear
from smoke.model.recompute import Recompute


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class _RMSNorm(torch.autograd.Function):
    """Saves the input, the weight and the reciprocal root mean square of each row."""

    @staticmethod
    def forward(ctx, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        wide_TH = x_TH.to(wide_dtype(x_TH.dtype))
        norm_T1 = torch.linalg.vector_norm(wide_TH, dim=-1, keepdim=True)
        rstd_T1 = norm_T1.square_().div_(x_TH.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TH, weight_H, rstd_T1)
        return (wide_TH * rstd_T1).mul_(weight_H.to(wide_TH.dtype)).to(x_TH.dtype)

    @staticmethod
    def backward(ctx, dy_TH: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TH, weight_H, rstd_T1 = ctx.saved_tensors
        unit_TH = x_TH.to(rstd_T1.dtype) * rstd_T1
        dy_TH = dy_TH.to(unit_TH.dtype)
        product_TH = dy_TH * unit_TH
        dweight_H = product_TH.sum(0).to(weight_H.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight_H, None
        weight_wide_H = weight_H.to(unit_TH.dtype)
        mean_T1 = torch.mv(product_TH, weight_wide_H).div_(x_TH.shape[-1]).unsqueeze(-1)
        dx_TH = (dy_TH * weight_wide_H).addcmul_(unit_TH, mean_T1, value=-1).mul_(rstd_T1)
        return dx_TH.to(x_TH.dtype), dweight_H, None


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype = torch.bfloat16, device=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device))

    def forward(self, x_TH: Tensor) -> Tensor:
        """x [T, H] -> [T, H], same dtype."""
        return _RMSNorm.apply(x_TH, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class _SwiGLU(torch.autograd.Function):
    """Saves its inputs only; rows may carry a weight (the routed experts' probabilities)."""

    @staticmethod
    def forward(ctx, x_T2I: Tensor, weight_T: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_T2I, weight_T)
        gate_TI, up_TI = x_T2I.to(wide_dtype(x_T2I.dtype)).chunk(2, dim=-1)
        y_TI = torch.nn.functional.silu(gate_TI).mul_(up_TI)
        if weight_T is not None:
            y_TI.mul_(weight_T.unsqueeze(-1))
        return y_TI.to(x_T2I.dtype)

    @staticmethod
    def backward(ctx, dy_TI: Tensor) -> tuple[Tensor, Tensor | None]:
        x_T2I, weight_T = ctx.saved_tensors
        wide_T2I = x_T2I.to(wide_dtype(x_T2I.dtype))
        gate_TI, up_TI = wide_T2I.chunk(2, dim=-1)
        dy_TI = dy_TI.to(wide_T2I.dtype)
        sigmoid_TI = gate_TI.sigmoid()
        silu_TI = gate_TI * sigmoid_TI
        slope_TI = sigmoid_TI.addcmul_(silu_TI, 1.0 - sigmoid_TI)
        dweight_T = None
        if weight_T is not None:
            dweight_T = (silu_TI * up_TI).mul_(dy_TI).sum(-1).to(weight_T.dtype)
            dy_TI = dy_TI * weight_T.unsqueeze(-1)
        dx_T2I = torch.empty_like(wide_T2I)
        dgate_TI, dup_TI = dx_T2I.chunk(2, dim=-1)
        torch.mul(slope_TI, up_TI, out=dgate_TI).mul_(dy_TI)
        torch.mul(silu_TI, dy_TI, out=dup_TI)
        return dx_T2I.to(x_T2I.dtype), dweight_T


def swiglu(x_T2I: Tensor, weight_T: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, times each row's weight if given, for x [T, 2I] = [gate; up] -> [T, I]."""
    return _SwiGLU.apply(x_T2I, weight_T)


class DenseMLP(nn.Module):
    """SwiGLU MLP with Megatron-core's names; gate and up projections are one GEMM.

    ``region`` names the output-discarding recompute region of the activation, if it belongs to one (shared experts).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        recompute: Recompute | None = None,
        region: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device=None,
    ):
        super().__init__()
        self.recompute, self.region = recompute or Recompute(), region
        self.linear_fc1 = Linear(hidden_size, 2 * intermediate_size, dtype=dtype, device=device)
        self.linear_fc2 = Linear(intermediate_size, hidden_size, dtype=dtype, device=device)

    def forward(self, x_TH: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        gate_up_T2I = self.linear_fc1(x_TH)
        if self.region is None:
            return self.linear_fc2(swiglu(gate_up_T2I))
        with self.recompute.discard(self.region, swiglu, gate_up_T2I) as act_TI:
            return self.linear_fc2(act_TI)


class _Embed(torch.autograd.Function):
    """Rows of the table; the gradient is summed in float32, in the order of the tokens."""

    @staticmethod
    def forward(ctx, table_VH: Tensor, tokens_T: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.table = table_VH.shape, table_VH.dtype
        return table_VH.index_select(0, tokens_T)

    @staticmethod
    def backward(ctx, dy_TH: Tensor) -> tuple[Tensor, None]:
        (tokens_T,) = ctx.saved_tensors
        shape, dtype = ctx.table
        dy_TH = dy_TH.to(wide_dtype(dtype))
        if dy_TH.is_cuda:  # sorts the tokens first, then adds each row's gradients in order
            dtable_VH = dy_TH.new_zeros(shape).index_put_((tokens_T,), dy_TH, accumulate=True)
        else:  # each thread owns a range of rows
            dtable_VH = torch.ops.aten.embedding_dense_backward(dy_TH, tokens_T, shape[0], -1, False)
        return dtable_VH.to(dtype), None


class Embedding(nn.Module):
    """Token embedding ``weight[V, H]``."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype = torch.bfloat16, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype, device=device))

    def forward(self, tokens_T: Tensor) -> Tensor:
        """tokens [T] int64 -> [T, H]."""
        return _Embed.apply(self.weight, tokens_T)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"
