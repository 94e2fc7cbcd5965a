"""What both Triton implementations of the backward share: row-wise dots, and the sum of partial gradients.

Names: p_ pointer, i_ index, m_ mask, b_ block; rows are tokens times heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 16, 128  # not tuned


@triton.jit
def _row_dots_kernel(p_a, p_b, p_out, rows, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = i_row < rows
    offsets = i_row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    b_a = tl.load(p_a + offsets, mask=m_row[:, None], other=0.0).to(tl.float32)
    b_b = tl.load(p_b + offsets, mask=m_row[:, None], other=0.0).to(tl.float32)
    tl.store(p_out + i_row, tl.sum(b_a * b_b, 1), mask=m_row)


@triton.jit
def _sum_kernel(p_parts, p_first, p_out, tokens, D, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    """Add the shares of one key block, in order, for a block of columns."""
    block = tl.program_id(0)
    i_key = tl.arange(0, BLOCK).to(tl.int64)
    i_col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_col = i_col < D
    total = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for share in range(tl.load(p_first + block), tl.load(p_first + block + 1)):
        offsets = (share * BLOCK + i_key)[:, None] * D + i_col[None, :]
        total += tl.load(p_parts + offsets, mask=m_col[None, :], other=0.0)
    i_token = block * BLOCK + i_key
    m_out = (i_token < tokens)[:, None] & m_col[None, :]
    tl.store(p_out + i_token[:, None] * D + i_col[None, :], total.to(p_out.dtype.element_ty), mask=m_out)


def row_dots(a_TNL: Tensor, b_TNL: Tensor) -> Tensor:
    """float32 [T, N]: the dot product of each row of two contiguous tensors whose width is a power of two."""
    out_TN = torch.empty(a_TNL.shape[:2], dtype=torch.float32, device=a_TNL.device)
    grid = (triton.cdiv(out_TN.numel(), _ROWS),)
    _row_dots_kernel[grid](a_TNL, b_TNL, out_TN, out_TN.numel(), a_TNL.shape[-1], _ROWS)
    return out_TN


def sum_shares(parts_WBD: Tensor, first_B1: Tensor, like_TD: Tensor) -> Tensor:
    """[T, D] in the dtype of ``like_TD``: for each key block the sum of its float32 shares [W, block, D], in order."""
    out_TD = torch.empty_like(like_TD)
    block, width = parts_WBD.shape[1:]
    grid = (first_B1.numel() - 1, triton.cdiv(width, _COLUMNS))
    _sum_kernel[grid](parts_WBD, first_B1, out_TD, out_TD.shape[0], width, block, _COLUMNS)
    return out_TD
