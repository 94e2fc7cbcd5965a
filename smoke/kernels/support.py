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
