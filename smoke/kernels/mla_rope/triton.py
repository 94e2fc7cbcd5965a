"""Triton kernels for MLA's rotary embedding and for the joins of absorbed MLA; ``reference`` says what they compute.

Three kernels, each one pass over memory:

* ``_rotate_kernel``: copies some columns and rotates others, forwards or backwards. Query, its gradient, both joins of
  absorbed MLA and their gradient are this kernel on different views.
* ``_key_value_kernel``: copies each head's nope columns and value, and writes the shared rotated key to every head.
* ``_key_value_grad_kernel``: the reverse. One program walks over all heads of a token, so the sum into the shared key's
  gradient needs no atomics and has one order.

Rules they keep: every index is int64 before it meets a stride (a tensor may have more than 2^31 elements);
all strides are passed, so any view goes in and no copy is made; heads and columns are masked, by the index in the whole
tensor; arithmetic is float32 (float64 for float64) with one cast at the store, and without fused multiply-add, so that
results equal the reference's to the last bit, except the sum over heads, which torch takes in another order. A position
outside the tables gives NaN. Block sizes are not tuned.

Only this file imports triton; the API imports it when ``impl`` says so.

Names: p_ pointer, s_ stride (then its tensor, then its dimension), i_ index, m_ mask, b_ block of values; T tokens, N
heads, C columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoke.kernels.mla_rope.tables import Tables

LARGEST_BLOCKS = (8, 128)
"""Heads and copied columns that one program takes at a time, at most; not tuned."""


@triton.jit
def _angles(
    p_cos,
    p_sin,
    p_pos,
    i_token,
    rows,
    s_cos_P,
    s_cos_C,
    s_sin_P,
    s_sin_C,
    s_pos_T,
    i_pair,
    HALF: tl.constexpr,
    ACC: tl.constexpr,
):
    """cos and sin of one token's position, [pairs]."""
    # One copy for each pair: Triton's interpreter cannot combine a scalar condition with a block of them.
    i_row = tl.load(p_pos + i_token * s_pos_T) + tl.zeros_like(i_pair)
    m_pair = (i_pair < HALF) & (i_row >= 0) & (i_row < rows)
    b_cos = tl.load(p_cos + i_row * s_cos_P + i_pair * s_cos_C, mask=m_pair, other=float("nan"))
    b_sin = tl.load(p_sin + i_row * s_sin_P + i_pair * s_sin_C, mask=m_pair, other=float("nan"))
    return b_cos.to(ACC), b_sin.to(ACC)


@triton.jit
def _copy(
    p_in, s_in_N, s_in_C, FIRST_IN: tl.constexpr, p_out, s_out_N, s_out_C, FIRST_OUT: tl.constexpr,
    i_head, m_head, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copy WIDTH columns of a block of heads of one token, from column FIRST_IN on to column FIRST_OUT on."""
    for start in range(0, WIDTH, BLOCK_C):
        i_col = start + tl.arange(0, BLOCK_C).to(tl.int64)
        m_copy = m_head[:, None] & (i_col < WIDTH)[None, :]
        p_from = p_in + i_head[:, None] * s_in_N + (FIRST_IN + i_col)[None, :] * s_in_C
        p_to = p_out + i_head[:, None] * s_out_N + (FIRST_OUT + i_col)[None, :] * s_out_C
        tl.store(p_to, tl.load(p_from, mask=m_copy, other=0.0).to(p_out.dtype.element_ty), mask=m_copy)


@triton.jit
def _rotate_kernel(
    p_copy, s_copy_T, s_copy_N, s_copy_C,
    p_copied, s_copied_T, s_copied_N, s_copied_C,
    p_pe, s_pe_T, s_pe_N, s_pe_C,
    p_out, s_out_T, s_out_N, s_out_C,
    p_cos, s_cos_P, s_cos_C,
    p_sin, s_sin_P, s_sin_C,
    p_pos, s_pos_T,
    rows, heads,
    COPIED: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """copied[t, n] = copy[t, n]; out[t, n] = pe[t, n] rotated. One program: one token, a block of heads."""
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_head = i_head < heads
    _copy(
        p_copy + i_token * s_copy_T, s_copy_N, s_copy_C, 0,
        p_copied + i_token * s_copied_T, s_copied_N, s_copied_C, 0,
        i_head, m_head, COPIED, BLOCK_C,
    )  # fmt: skip
    i_pair = tl.arange(0, BLOCK_H).to(tl.int64)
    b_cos, b_sin = _angles(
        p_cos, p_sin, p_pos, i_token, rows, s_cos_P, s_cos_C, s_sin_P, s_sin_C, s_pos_T, i_pair, HALF, ACC
    )
    if INVERSE:
        b_sin = -b_sin
        i_a, i_b, i_first, i_second = i_pair, i_pair + HALF, 2 * i_pair, 2 * i_pair + 1
    else:
        i_a, i_b, i_first, i_second = 2 * i_pair, 2 * i_pair + 1, i_pair, i_pair + HALF
    m_pe = m_head[:, None] & (i_pair < HALF)[None, :]
    p_in = p_pe + i_token * s_pe_T + i_head[:, None] * s_pe_N
    b_a = tl.load(p_in + i_a[None, :] * s_pe_C, mask=m_pe, other=0.0).to(ACC)
    b_b = tl.load(p_in + i_b[None, :] * s_pe_C, mask=m_pe, other=0.0).to(ACC)
    b_first = (b_a * b_cos[None, :] - b_b * b_sin[None, :]).to(p_pe.dtype.element_ty)  # rounded before it is widened
    b_second = (b_a * b_sin[None, :] + b_b * b_cos[None, :]).to(p_pe.dtype.element_ty)
    p_to = p_out + i_token * s_out_T + i_head[:, None] * s_out_N
    tl.store(p_to + i_first[None, :] * s_out_C, b_first.to(p_out.dtype.element_ty), mask=m_pe)
    tl.store(p_to + i_second[None, :] * s_out_C, b_second.to(p_out.dtype.element_ty), mask=m_pe)


@triton.jit
def _key_value_kernel(
    p_kv, s_kv_T, s_kv_N, s_kv_C,
    p_pe, s_pe_T, s_pe_C,
    p_key, s_key_T, s_key_N, s_key_C,
    p_value, s_value_T, s_value_N, s_value_C,
    p_cos, s_cos_P, s_cos_C,
    p_sin, s_sin_P, s_sin_C,
    p_pos, s_pos_T,
    rows, heads,
    NOPE: tl.constexpr, VALUE: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """key[t, n] = (kv[t, n, :NOPE], pe[t] rotated); value[t, n] = kv[t, n, NOPE:]. One token, a block of heads."""
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_head = i_head < heads
    p_kv += i_token * s_kv_T
    p_key += i_token * s_key_T
    p_value += i_token * s_value_T
    _copy(p_kv, s_kv_N, s_kv_C, 0, p_key, s_key_N, s_key_C, 0, i_head, m_head, NOPE, BLOCK_C)
    _copy(p_kv, s_kv_N, s_kv_C, NOPE, p_value, s_value_N, s_value_C, 0, i_head, m_head, VALUE, BLOCK_C)
    i_pair = tl.arange(0, BLOCK_H).to(tl.int64)
    m_pair = i_pair < HALF
    b_cos, b_sin = _angles(
        p_cos, p_sin, p_pos, i_token, rows, s_cos_P, s_cos_C, s_sin_P, s_sin_C, s_pos_T, i_pair, HALF, ACC
    )
    p_pe += i_token * s_pe_T
    b_a = tl.load(p_pe + 2 * i_pair * s_pe_C, mask=m_pair, other=0.0).to(ACC)
    b_b = tl.load(p_pe + (2 * i_pair + 1) * s_pe_C, mask=m_pair, other=0.0).to(ACC)
    b_first = (b_a * b_cos - b_b * b_sin).to(p_key.dtype.element_ty)
    b_second = (b_a * b_sin + b_b * b_cos).to(p_key.dtype.element_ty)
    m_key = m_head[:, None] & m_pair[None, :]
    p_to = p_key + i_head[:, None] * s_key_N
    p_first, p_second = p_to + (NOPE + i_pair)[None, :] * s_key_C, p_to + (NOPE + HALF + i_pair)[None, :] * s_key_C
    tl.store(p_first, tl.broadcast_to(b_first[None, :], (BLOCK_N, BLOCK_H)), mask=m_key)
    tl.store(p_second, tl.broadcast_to(b_second[None, :], (BLOCK_N, BLOCK_H)), mask=m_key)


@triton.jit
def _key_value_grad_kernel(
    p_dkey, s_dkey_T, s_dkey_N, s_dkey_C,
    p_dvalue, s_dvalue_T, s_dvalue_N, s_dvalue_C,
    p_dkv, s_dkv_T, s_dkv_N, s_dkv_C,
    p_dpe, s_dpe_T, s_dpe_C,
    p_cos, s_cos_P, s_cos_C,
    p_sin, s_sin_P, s_sin_C,
    p_pos, s_pos_T,
    rows, heads,
    NOPE: tl.constexpr, VALUE: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dkv[t, n] = (dkey[t, n, :NOPE], dvalue[t, n]); dpe[t] = sum over n of dkey[t, n, NOPE:], rotated back."""
    i_token = tl.program_id(0).to(tl.int64)
    p_dkey += i_token * s_dkey_T
    p_dvalue += i_token * s_dvalue_T
    p_dkv += i_token * s_dkv_T
    i_pair = tl.arange(0, BLOCK_H).to(tl.int64)
    m_pair = i_pair < HALF
    b_a = tl.zeros((BLOCK_N, BLOCK_H), dtype=ACC)
    b_b = tl.zeros((BLOCK_N, BLOCK_H), dtype=ACC)
    for start in range(0, heads, BLOCK_N):
        i_head = start + tl.arange(0, BLOCK_N).to(tl.int64)
        m_head = i_head < heads
        _copy(p_dkey, s_dkey_N, s_dkey_C, 0, p_dkv, s_dkv_N, s_dkv_C, 0, i_head, m_head, NOPE, BLOCK_C)
        _copy(p_dvalue, s_dvalue_N, s_dvalue_C, 0, p_dkv, s_dkv_N, s_dkv_C, NOPE, i_head, m_head, VALUE, BLOCK_C)
        m_key = m_head[:, None] & m_pair[None, :]
        p_from = p_dkey + i_head[:, None] * s_dkey_N
        b_a += tl.load(p_from + (NOPE + i_pair)[None, :] * s_dkey_C, mask=m_key, other=0.0).to(ACC)
        b_b += tl.load(p_from + (NOPE + HALF + i_pair)[None, :] * s_dkey_C, mask=m_key, other=0.0).to(ACC)
    b_a = tl.sum(b_a, axis=0)
    b_b = tl.sum(b_b, axis=0)
    b_cos, b_sin = _angles(
        p_cos, p_sin, p_pos, i_token, rows, s_cos_P, s_cos_C, s_sin_P, s_sin_C, s_pos_T, i_pair, HALF, ACC
    )
    b_first = (b_a * b_cos + b_b * b_sin).to(p_dpe.dtype.element_ty)
    b_second = (b_b * b_cos - b_a * b_sin).to(p_dpe.dtype.element_ty)
    p_to = p_dpe + i_token * s_dpe_T
    tl.store(p_to + 2 * i_pair * s_dpe_C, b_first, mask=m_pair)
    tl.store(p_to + (2 * i_pair + 1) * s_dpe_C, b_second, mask=m_pair)


def query(q_TND: Tensor, tables: Tables, rope_dim: int, inverse: bool = False) -> Tensor:
    """As ``reference.query``."""
    out_TND = q_TND.new_empty(q_TND.shape)
    split = (q_TND.shape[-1] - rope_dim, rope_dim)
    (copy_TNC, pe_TNR), (copied_TNC, out_TNR) = (tensor.split(split, dim=-1) for tensor in (q_TND, out_TND))
    rotate_into(copy_TNC, pe_TNR, copied_TNC, out_TNR, tables, inverse)
    return out_TND


def join(latent_TNL: Tensor, pe_TNR: Tensor, tables: Tables, out_dtype: torch.dtype) -> Tensor:
    """The join of ``smoke.kernels.absorb``."""
    widths = (latent_TNL.shape[-1], pe_TNR.shape[-1])
    out_TND = pe_TNR.new_empty(*pe_TNR.shape[:-1], sum(widths), dtype=out_dtype)
    copied_TNL, out_TNR = out_TND.split(widths, dim=-1)
    rotate_into(latent_TNL, pe_TNR, copied_TNL, out_TNR, tables)
    return out_TND


def join_grad(dout_TND: Tensor, tables: Tables, rope_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gradients of ``join``; the latent's is a view of ``dout`` where no cast is needed."""
    dlatent_TNL, dpe_TNR = dout_TND.to(dtype).split((dout_TND.shape[-1] - rope_dim, rope_dim), dim=-1)
    out_TNR = dpe_TNR.new_empty(dpe_TNR.shape)
    rotate_into(dpe_TNR[..., :0], dpe_TNR, out_TNR[..., :0], out_TNR, tables, inverse=True)
    return dlatent_TNL, out_TNR


def key_value(kv_TNC: Tensor, k_pe_TR: Tensor, tables: Tables, nope_dim: int) -> tuple[Tensor, Tensor]:
    """As ``reference.key_value``."""
    tokens, heads, columns = kv_TNC.shape
    key_TND = kv_TNC.new_empty(tokens, heads, nope_dim + k_pe_TR.shape[-1])
    value_TNV = kv_TNC.new_empty(tokens, heads, columns - nope_dim)
    key_value_into(kv_TNC, k_pe_TR, key_TND, value_TNV, tables)
    return key_TND, value_TNV


def key_value_grad(dkey_TND: Tensor, dvalue_TNV: Tensor, tables: Tables, nope_dim: int) -> tuple[Tensor, Tensor]:
    """As ``reference.key_value_grad``."""
    tokens, heads, columns = dkey_TND.shape
    dkv_TNC = dkey_TND.new_empty(tokens, heads, nope_dim + dvalue_TNV.shape[-1])
    dk_pe_TR = dkey_TND.new_empty(tokens, columns - nope_dim)
    key_value_grad_into(dkey_TND, dvalue_TNV, dkv_TNC, dk_pe_TR, tables)
    return dkv_TNC, dk_pe_TR


def rotate_into(
    copy_TNC: Tensor,
    pe_TNR: Tensor,
    copied_TNC: Tensor,
    out_TNR: Tensor,
    tables: Tables,
    inverse: bool = False,
    blocks: tuple[int, int] = LARGEST_BLOCKS,
) -> None:
    """Write ``copy`` to ``copied`` and ``pe``, rotated, to ``out``: views of any strides."""
    (tokens, heads, rope_dim), copied = pe_TNR.shape, copy_TNC.shape[-1]
    meta = _blocks(heads, copied, rope_dim, blocks)
    grid = (tokens, triton.cdiv(heads, meta["BLOCK_N"]))
    args = _with_strides(copy_TNC, copied_TNC, pe_TNR, out_TNR, *tables)
    _launch(_rotate_kernel, grid, tables, heads, pe_TNR, args, COPIED=copied, INVERSE=inverse, **meta)


def key_value_into(
    kv_TNC: Tensor,
    k_pe_TR: Tensor,
    key_TND: Tensor,
    value_TNV: Tensor,
    tables: Tables,
    blocks: tuple[int, int] = LARGEST_BLOCKS,
) -> None:
    """Write key and value: views of any strides."""
    (tokens, heads, columns), value = kv_TNC.shape, value_TNV.shape[-1]
    meta = _blocks(heads, max(columns - value, value), k_pe_TR.shape[-1], blocks)
    grid = (tokens, triton.cdiv(heads, meta["BLOCK_N"]))
    args = _with_strides(kv_TNC, k_pe_TR, key_TND, value_TNV, *tables)
    _launch(_key_value_kernel, grid, tables, heads, kv_TNC, args, NOPE=columns - value, VALUE=value, **meta)


def key_value_grad_into(
    dkey_TND: Tensor,
    dvalue_TNV: Tensor,
    dkv_TNC: Tensor,
    dk_pe_TR: Tensor,
    tables: Tables,
    blocks: tuple[int, int] = LARGEST_BLOCKS,
) -> None:
    """Write the gradients of kv and k_pe: views of any strides."""
    (tokens, heads, columns), rope_dim, value = dkey_TND.shape, dk_pe_TR.shape[-1], dvalue_TNV.shape[-1]
    nope = columns - rope_dim
    meta = _blocks(heads, max(nope, value), rope_dim, blocks)
    args = _with_strides(dkey_TND, dvalue_TNV, dkv_TNC, dk_pe_TR, *tables)
    _launch(_key_value_grad_kernel, (tokens,), tables, heads, dkey_TND, args, NOPE=nope, VALUE=value, **meta)


def interpreted() -> bool:
    """Whether Triton's CPU interpreter runs the kernels (decided when triton was imported)."""
    return not isinstance(_rotate_kernel, triton.runtime.JITFunction)


def _blocks(heads: int, columns: int, rope_dim: int, largest: tuple[int, int]) -> dict[str, int]:
    power, (most_heads, most_columns) = triton.next_power_of_2, largest
    return {
        "BLOCK_N": min(power(heads), most_heads),
        "BLOCK_C": min(power(max(columns, 1)), most_columns),
        "BLOCK_H": power(rope_dim // 2),
        "HALF": rope_dim // 2,
    }


def _with_strides(*tensors: Tensor) -> list:
    return [item for tensor in tensors for item in (tensor, *tensor.stride())]


def _launch(kernel, grid: tuple[int, ...], tables: Tables, heads: int, x: Tensor, args: list, **meta) -> None:
    if 0 in grid:
        return
    accumulator = tl.float64 if x.dtype is torch.float64 else tl.float32
    with torch.cuda.device_of(x):
        # Without fused multiply-add, so that the last bit is the reference's.
        kernel[grid](*args, tables.cos_PR.shape[0], heads, ACC=accumulator, enable_fp_fusion=False, **meta)
