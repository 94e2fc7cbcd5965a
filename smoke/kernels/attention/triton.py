"""Absorbed attention in portable Triton: any GPU that Triton compiles for, and Triton's CPU interpreter.

A row is one head of one token; all heads of a token see the same keys, so a tile of rows needs one mask and one tile of
latents, which is key and value at once. Tiles take consecutive rows, whatever the number of heads: a tile of 64 rows is
half a token of 128 heads, or 21 tokens and a bit of three heads.

``triton_sm90`` computes the same with explicit layouts and is several times faster on sm_90. The reason, for who tunes
this file: where one product feeds another, Triton lays all warps along the rows, and with 64 rows two groups of warps
then compute the same scores.

Names: p_ pointer, i_ index, m_ mask, b_ block; L latent columns, R rotated columns. Row numbers fit in 32 bits,
addresses are 64 bits wide. Scores are in base 2: exp2, and log2 of the denominator.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smoke.kernels.attention.common import row_dots, sum_shares
from smoke.kernels.attention.schedule import Schedule, schedule

LOG2_E = 1.4426950408889634
BLOCK_M, BLOCK_N = 32, 32  # not tuned; larger tiles spill at 512 latent columns


@triton.jit
def _rows(p_x, i_row, m_row, FIRST: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Columns FIRST to FIRST + WIDTH of some rows of a contiguous matrix; zero where masked."""
    offsets = i_row.to(tl.int64)[:, None] * STRIDE + FIRST + tl.arange(0, WIDTH)[None, :]
    return tl.load(p_x + offsets, mask=m_row[:, None], other=0.0)


@triton.jit
def _put(p_x, i_row, m_row, b_x, FIRST: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    offsets = i_row.to(tl.int64)[:, None] * STRIDE + FIRST + tl.arange(0, WIDTH)[None, :]
    tl.store(p_x + offsets, b_x.to(p_x.dtype.element_ty), mask=m_row[:, None])


@triton.jit
def _dot(b_a, b_b):
    return tl.dot(b_a, b_b, input_precision="ieee")


@triton.jit
def _forward_kernel(
    p_q, p_k, p_out, p_lse, p_start, rows, heads, scale_log2,
    L: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = L + R
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows first
    i_row = row + tl.arange(0, BLOCK_M)
    m_row = i_row < rows
    i_token = i_row // heads
    last = (tl.minimum(row + BLOCK_M, rows) - 1) // heads
    b_start = tl.load(p_start + i_token, mask=m_row, other=0)
    b_ql = _rows(p_q, i_row, m_row, 0, L, D)
    b_qr = _rows(p_q, i_row, m_row, L, R, D)
    b_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_out = tl.zeros((BLOCK_M, L), tl.float32)
    for start in range(tl.load(p_start + row // heads), last + 1, BLOCK_N):
        i_key = start + tl.arange(0, BLOCK_N)
        b_kl = _rows(p_k, i_key, i_key <= last, 0, L, D)
        b_kr = _rows(p_k, i_key, i_key <= last, L, R, D)
        b_s = (_dot(b_ql, tl.trans(b_kl)) + _dot(b_qr, tl.trans(b_kr))) * scale_log2
        m_seen = (i_key[None, :] <= i_token[:, None]) & (i_key[None, :] >= b_start[:, None])
        b_s = tl.where(m_seen, b_s, -float("inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_safe = tl.where(b_new == -float("inf"), 0.0, b_new)  # nothing seen yet
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_shrink = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        b_out = b_out * b_shrink[:, None] + _dot(b_p.to(b_kl.dtype), b_kl)
        b_max = b_new
    _put(p_out, i_row, m_row, b_out / b_sum[:, None], 0, L, L)
    tl.store(p_lse + i_row, b_max + tl.log2(b_sum), mask=m_row)


@triton.jit
def _query_grad_kernel(
    p_q, p_k, p_dout, p_lse, p_delta, p_dq, p_start, rows, heads, scale, scale_log2,
    L: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = L + R
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    i_row = row + tl.arange(0, BLOCK_M)
    m_row = i_row < rows
    i_token = i_row // heads
    last = (tl.minimum(row + BLOCK_M, rows) - 1) // heads
    b_start = tl.load(p_start + i_token, mask=m_row, other=0)
    b_lse = tl.load(p_lse + i_row, mask=m_row, other=float("inf"))
    b_delta = tl.load(p_delta + i_row, mask=m_row, other=0.0)
    b_ql = _rows(p_q, i_row, m_row, 0, L, D)
    b_qr = _rows(p_q, i_row, m_row, L, R, D)
    b_do = _rows(p_dout, i_row, m_row, 0, L, L)
    b_dl = tl.zeros((BLOCK_M, L), tl.float32)
    b_dr = tl.zeros((BLOCK_M, R), tl.float32)
    for start in range(tl.load(p_start + row // heads), last + 1, BLOCK_N):
        i_key = start + tl.arange(0, BLOCK_N)
        b_kl = _rows(p_k, i_key, i_key <= last, 0, L, D)
        b_kr = _rows(p_k, i_key, i_key <= last, L, R, D)
        b_s = _dot(b_ql, tl.trans(b_kl)) + _dot(b_qr, tl.trans(b_kr))
        m_seen = (i_key[None, :] <= i_token[:, None]) & (i_key[None, :] >= b_start[:, None])
        b_p = tl.exp2(b_s * scale_log2 - b_lse[:, None])
        b_ds = tl.where(m_seen, b_p * (_dot(b_do, tl.trans(b_kl)) - b_delta[:, None]), 0.0).to(b_kl.dtype)
        b_dl += _dot(b_ds, b_kl)
        b_dr += _dot(b_ds, b_kr)
    _put(p_dq, i_row, m_row, b_dl * scale, 0, L, D)
    _put(p_dq, i_row, m_row, b_dr * scale, L, R, D)


@triton.jit
def _latent_grad_kernel(
    p_q, p_k, p_dout, p_lse, p_delta, p_parts, p_start, p_share, tokens, heads, scale, scale_log2,
    L: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One share: a block of keys, and some rows. The value's gradient adds to the latent columns of the key's."""
    D: tl.constexpr = L + R
    p_mine = p_share + tl.program_id(0) * 4
    first, stop, slot = tl.load(p_mine + 1), tl.load(p_mine + 2), tl.load(p_mine + 3)
    i_key = tl.load(p_mine) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_kl = _rows(p_k, i_key, i_key < tokens, 0, L, D)
    b_kr = _rows(p_k, i_key, i_key < tokens, L, R, D)
    b_dl = tl.zeros((BLOCK_N, L), tl.float32)
    b_dr = tl.zeros((BLOCK_N, R), tl.float32)
    for row in range(first, stop, BLOCK_M):
        i_row = row + tl.arange(0, BLOCK_M)
        m_row = i_row < stop
        i_token = i_row // heads
        b_start = tl.load(p_start + i_token, mask=m_row, other=2147483647)
        b_lse = tl.load(p_lse + i_row, mask=m_row, other=float("inf"))
        b_delta = tl.load(p_delta + i_row, mask=m_row, other=0.0)
        b_ql = _rows(p_q, i_row, m_row, 0, L, D)
        b_qr = _rows(p_q, i_row, m_row, L, R, D)
        b_do = _rows(p_dout, i_row, m_row, 0, L, L)
        b_s = _dot(b_kl, tl.trans(b_ql)) + _dot(b_kr, tl.trans(b_qr))
        m_seen = (i_key[:, None] <= i_token[None, :]) & (i_key[:, None] >= b_start[None, :])
        b_p = tl.where(m_seen, tl.exp2(b_s * scale_log2 - b_lse[None, :]), 0.0)
        b_ds = b_p * (_dot(b_kl, tl.trans(b_do)) - b_delta[None, :]) * scale
        b_ds = tl.where(m_seen, b_ds, 0.0).to(b_kl.dtype)
        b_dl += _dot(b_p.to(b_kl.dtype), b_do) + _dot(b_ds, b_ql)
        b_dr += _dot(b_ds, b_qr)
    i_out = slot * BLOCK_N + tl.arange(0, BLOCK_N)
    m_all = i_out >= 0
    _put(p_parts, i_out, m_all, b_dl, 0, L, D)
    _put(p_parts, i_out, m_all, b_dr, L, R, D)


def _plan(query_TND: Tensor, lengths: tuple[int, ...]) -> Schedule:
    return schedule(lengths, query_TND.shape[1], BLOCK_N, query_TND.device)


def forward(
    query_TND: Tensor, latent_TD: Tensor, lengths: tuple[int, ...], scale: float, columns: int
) -> tuple[Tensor, Tensor]:
    """Output [T, N, L] and log2 of the softmax's denominator [T, N] float32, of contiguous inputs."""
    tokens, heads, width = query_TND.shape
    out_TNL = query_TND.new_empty(tokens, heads, columns)
    lse_TN = query_TND.new_empty(tokens, heads, dtype=torch.float32)
    grid = (triton.cdiv(tokens * heads, BLOCK_M),)
    _forward_kernel[grid](
        query_TND, latent_TD, out_TNL, lse_TN, _plan(query_TND, lengths).starts_T, tokens * heads, heads,
        scale * LOG2_E, columns, width - columns, BLOCK_M, BLOCK_N, num_warps=8, num_stages=2,
    )  # fmt: skip
    return out_TNL, lse_TN


def backward(
    query_TND: Tensor,
    latent_TD: Tensor,
    out_TNL: Tensor,
    lse_TN: Tensor,
    dout_TNL: Tensor,
    lengths: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of query and latent, of contiguous inputs; the same bits in every run."""
    (tokens, heads, width), columns = query_TND.shape, out_TNL.shape[-1]
    starts_T, shares_W4, first_B1 = _plan(query_TND, lengths)
    delta_TN = row_dots(out_TNL, dout_TNL)
    dquery_TND = torch.empty_like(query_TND)
    common = (query_TND, latent_TD, dout_TNL, lse_TN, delta_TN)
    sizes = (heads, scale, scale * LOG2_E, columns, width - columns, BLOCK_M, BLOCK_N)
    _query_grad_kernel[(triton.cdiv(tokens * heads, BLOCK_M),)](
        *common, dquery_TND, starts_T, tokens * heads, *sizes, num_warps=8, num_stages=2
    )
    parts_WBD = query_TND.new_empty(len(shares_W4), BLOCK_N, width, dtype=torch.float32)
    _latent_grad_kernel[(len(shares_W4),)](
        *common, parts_WBD, starts_T, shares_W4, tokens, *sizes, num_warps=8, num_stages=2
    )
    return dquery_TND, sum_shares(parts_WBD, first_B1, latent_TD)
