"""Core attention of absorbed MLA, differentiable: all query heads share one latent, which is key and value at once.

Causal inside each sequence; packed sequences are given by their lengths. ``reference`` says what is computed.
``triton`` runs the kernels of ``triton_sm90`` where it can (sm_90) and those of ``triton`` elsewhere. Both save query,
latent, output and one float32 number a row, and both give the same bits in every run: nothing is added atomically.

Limit of every tiled kernel: a NaN or an infinity in one sequence can reach others that share a tile with it, since
products multiply it by zero.

Shape letters: T tokens, N query heads, D width (latent and rotated columns), L latent columns.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smoke.kernels.attention import reference
from smoke.kernels.support import triton_missing

LATENT, ROTATED = (16, 512), (16, 64)
"""Smallest and largest legal widths; both are powers of two."""
HOPPER_LEAST_LATENT = 32


def attend(
    query_TND: Tensor,
    latent_TD: Tensor,
    *,
    lengths: Sequence[int],
    scale: float,
    columns: int,
    impl: str = "reference",
) -> Tensor:
    """Attention of query [T, N, D] to latent [T, D] -> [T, N, columns], in the query's dtype.

    Args:
        lengths: tokens of each sequence, in order, none empty; they sum to T.
        scale: factor of the scores.
        columns: latent columns, the first of D; they are the value.
        impl: reference (any float dtype, any device) or triton (BF16 or FP16 on a GPU).

    Raises:
        ValueError: shapes or lengths that do not fit, or an implementation that cannot run this.
    """
    lengths = tuple(lengths)
    _check(query_TND, latent_TD, lengths, columns)
    if impl == "reference":
        return reference.attend(query_TND, latent_TD, lengths=lengths, scale=scale, columns=columns)[0]
    reason = blocker(query_TND.device, query_TND.dtype, columns, query_TND.shape[-1] - columns)
    if impl != "triton" or reason:
        raise ValueError(f"impl {impl!r}: {reason or 'reference or triton'}")
    module = implementation(query_TND.device, columns)
    return _Attend.apply(query_TND.contiguous(), latent_TD.contiguous(), lengths, scale, columns, module)


def blocker(device: torch.device, dtype: torch.dtype, latent: int, rotated: int) -> str:
    """Why the Triton kernels cannot run this; empty when they can."""
    if triton_missing():
        return triton_missing()
    if device.type != "cuda":
        return "Triton kernels need a CUDA device; use reference"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels take BF16 and FP16, not {dtype}; use reference"
    for what, width, (low, high) in (("latent", latent, LATENT), ("rotated", rotated, ROTATED)):
        if not low <= width <= high or width & (width - 1):
            legal = [low << n for n in range(high.bit_length()) if low << n <= high]
            nearest = min(legal, key=lambda size: abs(size - width))
            return f"{width} {what} columns: the kernels take {legal}; the nearest legal is {nearest}"
    return ""


def implementation(device: torch.device, latent: int) -> ModuleType:
    """``triton_sm90`` on sm_90 with a Triton that has Gluon, else ``triton``."""
    return _module(_gluon(device) and latent >= HOPPER_LEAST_LATENT)


@functools.cache
def _gluon(device: torch.device) -> bool:
    found = importlib.util.find_spec("triton.experimental")
    has_gluon = found is not None and importlib.util.find_spec("triton.experimental.gluon") is not None
    return has_gluon and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _module(sm90: bool) -> ModuleType:
    return importlib.import_module(f"smoke.kernels.attention.{'triton_sm90' if sm90 else 'triton'}")


def _check(query_TND: Tensor, latent_TD: Tensor, lengths: tuple[int, ...], columns: int) -> None:
    if query_TND.dim() != 3 or latent_TD.shape != (query_TND.shape[0], query_TND.shape[2]):
        raise ValueError(
            f"query {tuple(query_TND.shape)} and latent {tuple(latent_TD.shape)}: wanted [T, N, D], [T, D]"
        )
    if query_TND.dtype is not latent_TD.dtype or query_TND.device != latent_TD.device:
        raise ValueError("query and latent have one dtype and lie on one device")
    if min(lengths, default=0) < 1 or sum(lengths) != query_TND.shape[0]:
        raise ValueError(f"lengths {lengths[:8]} must be positive and sum to {query_TND.shape[0]} tokens")
    if not 0 < columns <= query_TND.shape[2]:
        raise ValueError(f"columns {columns}: between 1 and the width {query_TND.shape[2]}")
    if query_TND.shape[0] * query_TND.shape[1] >= 2**31:
        raise ValueError("tokens times heads must be below 2^31")


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_TND: Tensor, latent_TD: Tensor, lengths, scale: float, columns: int, module) -> Tensor:
        out_TNL, lse_TN = module.forward(query_TND, latent_TD, lengths, scale, columns)
        ctx.save_for_backward(query_TND, latent_TD, out_TNL, lse_TN)
        ctx.lengths, ctx.scale, ctx.module = lengths, scale, module
        return out_TNL

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_TNL: Tensor):
        saved = ctx.saved_tensors
        dquery, dlatent = ctx.module.backward(*saved, dout_TNL.contiguous(), ctx.lengths, ctx.scale)
        return dquery, dlatent, None, None, None, None
