"""What every kernel room shares: the exact-product rule and the facts that choose an implementation.

``product`` is the one matrix product of the project. BF16 operands are multiplied exactly and accumulated in float32,
with one rounding to the output type, on every device:

* CUDA, and CPUs with BF16 matrix instructions: the stock BF16 product;
* other CPUs: the operands are widened to float32 (exact), multiplied there and rounded once. The stock BF16 product of
  such CPUs is a scalar loop, a hundred times slower.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from smoke.environment import cpu_has_bf16


@functools.cache
def triton_missing() -> str:
    """Why Triton cannot be imported here; empty when it can."""
    return "" if importlib.util.find_spec("triton") else "the package triton is not installed"


def stock_bf16(device: torch.device) -> bool:
    """Whether BF16 products run on the device's own BF16 instructions."""
    return device.type != "cpu" or cpu_has_bf16()


def widened(x: Tensor) -> Tensor:
    """BF16 operand of several products, in the type in which ``product`` multiplies on this device."""
    return x if x.dtype is not torch.bfloat16 or stock_bf16(x.device) else x.float()


def product(
    a_MK: Tensor, b_KN: Tensor, *, factor: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``a @ b`` for two matrices, or two batches of them, accumulated in float32 (float64 for float64 operands).

    An operand that ``widened`` has turned to float32 is taken as the BF16 it was; name the ``out_dtype`` then.

    ``factor`` is a float32 scalar applied to the float32 result before the one rounding to ``out_dtype`` (default: the
    operands' dtype).
    """
    out_dtype = out_dtype or a_MK.dtype
    if torch.bfloat16 not in (a_MK.dtype, b_KN.dtype):
        y_MN = a_MK @ b_KN
        return (y_MN if factor is None else y_MN * factor).to(out_dtype)
    if factor is None and out_dtype is torch.bfloat16 and stock_bf16(a_MK.device):
        return a_MK @ b_KN
    if a_MK.is_cuda:
        multiply = torch.bmm if a_MK.dim() == 3 else torch.mm
        y_MN = multiply(a_MK, b_KN, out_dtype=torch.float32)
    else:
        y_MN = a_MK.float() @ b_KN.float()
    if factor is not None:
        y_MN *= factor
    return y_MN.to(out_dtype)


def grouped_product(
    a_PK: Tensor,
    b_KN: Sequence[Tensor],
    rows: Sequence[int],
    *,
    factors: Sequence[Tensor | None] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``product`` of consecutive rows of a with a matrix each -> [P, N]; ``rows`` of each group sum to P."""
    out_dtype = out_dtype or a_PK.dtype
    factors = factors or [None] * len(rows)
    wide_PK = widened(a_PK)
    if wide_PK.dtype is not torch.float32:
        groups = zip(a_PK.split(rows), b_KN, factors, strict=True)
        parts = [product(a_nK, b, factor=f, out_dtype=out_dtype) for a_nK, b, f in groups]
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    y_PN = wide_PK.new_empty(a_PK.shape[0], b_KN[0].shape[1])
    for a_nK, y_nN, b, factor in zip(wide_PK.split(rows), y_PN.split(rows), b_KN, factors, strict=True):
        torch.mm(a_nK, b.float(), out=y_nN)
        if factor is not None:
            y_nN *= factor
    return y_PN.to(out_dtype)
