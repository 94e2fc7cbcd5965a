"""The definition of MLA's rotary embedding: plain torch, any device, any width.

A rotated pair lies in neighbouring columns of the input, (x[2i], x[2i + 1]) = (a, b), and in the two halves of the
output, (y[i], y[R/2 + i]) = (a cos - b sin, a sin + b cos): the layout of the checkpoints going in, the one that
attention kernels and Megatron-core's fused MLA rope use coming out. ``inverse`` runs it backwards (halves in, pairs
out, sine negated); as the rotation is linear, that is its gradient.

Arithmetic is float32 (float64 for float64 tensors): two products and one sum, each rounded, then one cast to the
tensor's type. Fused multiply-add would give other last bits, so no implementation may use it.

Every function is differentiable by plain autograd, which is how the explicit gradients are tested.

Shape letters: T tokens, N heads, D head columns, R rotated columns, C columns that are copied, V value columns, P rows
of the tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoke.kernels.mla_rope.tables import Tables


def rotate(x_TNR: Tensor, tables: Tables, inverse: bool = False) -> Tensor:
    """x [T, N, R] -> [T, N, R], all columns rotated, in the type that the arithmetic has (float32 or float64)."""
    dtype = torch.promote_types(x_TNR.dtype, torch.float32)
    cos_T1R, sin_T1R = (table[tables.positions_T].to(dtype).unsqueeze(1) for table in tables[:2])
    x_TNR = x_TNR.to(dtype)
    if inverse:
        a_TNR, b_TNR = x_TNR.chunk(2, dim=-1)
        first_TNR, second_TNR = a_TNR * cos_T1R + b_TNR * sin_T1R, b_TNR * cos_T1R - a_TNR * sin_T1R
        return torch.stack((first_TNR, second_TNR), dim=-1).flatten(-2)
    a_TNR, b_TNR = x_TNR.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat((a_TNR * cos_T1R - b_TNR * sin_T1R, a_TNR * sin_T1R + b_TNR * cos_T1R), dim=-1)


def query(q_TND: Tensor, tables: Tables, rope_dim: int, inverse: bool = False) -> Tensor:
    """q [T, N, D] -> [T, N, D]: the last ``rope_dim`` columns rotated, the first copied."""
    copied_TNC, pe_TNR = q_TND.split((q_TND.shape[-1] - rope_dim, rope_dim), dim=-1)
    return torch.cat((copied_TNC, rotate(pe_TNR, tables, inverse).to(q_TND.dtype)), dim=-1)


def key_value(kv_TNC: Tensor, k_pe_TR: Tensor, tables: Tables, nope_dim: int) -> tuple[Tensor, Tensor]:
    """kv [T, N, nope + V], one k_pe [T, R] for all heads -> key [T, N, nope + R], value [T, N, V], both new tensors."""
    nope_TNK, value_TNV = kv_TNC.split((nope_dim, kv_TNC.shape[-1] - nope_dim), dim=-1)
    pe_T1R = rotate(k_pe_TR.unsqueeze(1), tables).to(kv_TNC.dtype)
    key_TND = torch.cat((nope_TNK, pe_T1R.expand(-1, kv_TNC.shape[1], -1)), dim=-1)
    return key_TND, value_TNV.clone(memory_format=torch.contiguous_format)


def key_value_grad(dkey_TND: Tensor, dvalue_TNV: Tensor, tables: Tables, nope_dim: int) -> tuple[Tensor, Tensor]:
    """Gradients of ``key_value``: dkv [T, N, nope + V]; dk_pe [T, R], summed over the heads and then rotated back."""
    dnope_TNK, dpe_TNR = dkey_TND.split((nope_dim, dkey_TND.shape[-1] - nope_dim), dim=-1)
    dtype = torch.promote_types(dkey_TND.dtype, torch.float32)
    dpe_T1R = rotate(dpe_TNR.sum(1, keepdim=True, dtype=dtype), tables, inverse=True)
    return torch.cat((dnope_TNK, dvalue_TNV), dim=-1), dpe_T1R.squeeze(1).to(dkey_TND.dtype)
