"""Absorbed attention for sm_90 in Gluon, Triton's language with explicit layouts, shared memory and barriers.

A program has two groups of four warps, and an accumulator of 64 x 512 float32 leaves no registers for more than 64
rows. What then decides is how often operands are read from shared memory, so in all three kernels each group of warps
owns a half of the *columns* of every product, and:

* forward: scores of 128 keys at once, so that the query is read once for 64 keys of each group. There is room for one
  tile of 128 latents only; its first half is loaded again as soon as the first half of the second product is done.
  Probabilities lie where the rotated key columns were, which nobody needs by then.
* query gradient: rows of the query and of the output's gradient lie in one tile of 128 rows, so that scores and
  probability gradients are one product, and one group of warps computes each.
* latent gradient: the same with the tile as the other operand, for 64 keys and 32 rows.

Scores then change hands through a float32 tile in shared memory. Latents are loaded by TMA, which gives zeros beyond
the tensor. Rows, masks, base 2 and the order of sums are those of ``triton``.

Widths: powers of two, latent columns 64 to 512, rotated columns 16 to 64. Tuned on an H200.

Names: d_ TMA descriptor, p_ pointer, i_ index, m_ mask, b_ block, s_ shared memory, t_ product in flight, L_ layout.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from smoke.kernels.attention.common import row_dots, sum_shares
from smoke.kernels.attention.schedule import schedule

LOG2_E = 1.4426950408889634
ROWS = 64
FORWARD_KEYS, GRAD_KEYS = 128, 32
SHARE_KEYS, SHARE_ROWS = 64, 32


@gluon.jit
def _barriers():
    s_bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(3):
        mbarrier.init(s_bars.index(index), count=1)
    return s_bars


@gluon.jit
def _load(descriptor, row, column: gl.constexpr, bar, s_tile, wanted):
    tma.async_copy_global_to_shared(descriptor, [row, column], bar, s_tile, pred=wanted)


@gluon.jit
def _put(p_x, row, b_x, limit, FIRST: gl.constexpr, STRIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """Store a tile of rows into some columns of a contiguous matrix."""
    i_row = row + gl.arange(0, b_x.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    i_col = FIRST + gl.arange(0, b_x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    offsets = i_row.to(gl.int64)[:, None] * STRIDE + i_col[None, :]
    gl.store(p_x + offsets, b_x.to(p_x.dtype.element_ty), mask=(i_row < limit)[:, None])


@gluon.jit
def _thread_sums(b_x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Sums over the columns that one thread holds: [rows, groups of warps, threads in a row]."""
    return gl.sum(gl.sum(b_x.reshape([ROWS, 2, COLUMNS // 16, 4, 2]), 4), 2)


@gluon.jit
def _forward_kernel(
    d_q, d_qr, d_k, d_kr, p_out, p_lse, p_start, rows, heads, scale_log2,
    L: gl.constexpr, R: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    H: gl.constexpr = N // 2
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, H, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, L // 2, 16])
    L_P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, N], d_k.dtype)
    s_q = gl.allocate_shared_memory(d_k.dtype, [M, L], d_q.layout)
    s_qr = gl.allocate_shared_memory(d_k.dtype, [M, R], d_qr.layout)
    s_k = gl.allocate_shared_memory(d_k.dtype, [N, L], d_k.layout)
    s_kr = gl.allocate_shared_memory(d_k.dtype, [N, R], d_kr.layout)
    if R >= M:  # noqa: SIM108 - one side only is compiled
        s_p = s_kr._reinterpret(d_k.dtype, [M, N], L_P)
    else:
        s_p = gl.allocate_shared_memory(d_k.dtype, [M, N], L_P)
    bars = _barriers()
    row = (gl.num_programs(0) - 1 - gl.program_id(0)) * M  # the longest rows first
    last = (gl.minimum(row + M, rows) - 1) // heads
    first = gl.load(p_start + row // heads)
    tiles = (last - first) // N + 1
    mbarrier.expect(bars.index(2), M * (L + R) * 2)
    _load(d_q, row, 0, bars.index(2), s_q, True)
    _load(d_qr, row, L, bars.index(2), s_qr, True)
    mbarrier.expect(bars.index(0), H * L * 2)
    _load(d_k, first, 0, bars.index(0), s_k.slice(0, H), True)
    mbarrier.expect(bars.index(1), (H * L + N * R) * 2)
    _load(d_k, first + H, 0, bars.index(1), s_k.slice(H, H), True)
    _load(d_kr, first, L, bars.index(1), s_kr, True)
    i_row = row + gl.arange(0, M, layout=gl.SliceLayout(1, L_S))
    i_token = i_row // heads
    b_start = gl.load(p_start + i_token, mask=i_row < rows, other=0)
    b_zero = gl.zeros([M, N], gl.float32, layout=L_S)
    b_max = gl.full([M], -float("inf"), gl.float32, layout=gl.SliceLayout(1, L_S))
    b_sums = _thread_sums(b_zero, M, N)
    b_out = gl.zeros([M, L], gl.float32, layout=L_O)
    mbarrier.wait(bars.index(2), 0)
    for tile in range(0, tiles):
        key = first + tile * N
        mbarrier.wait(bars.index(0), tile & 1)
        mbarrier.wait(bars.index(1), tile & 1)
        t_s = warpgroup_mma(s_q, s_k.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        t_s = warpgroup_mma(s_qr, s_kr.permute((1, 0)), t_s, is_async=True)
        b_s = warpgroup_mma_wait(num_outstanding=0, deps=[t_s])
        i_key = key + gl.arange(0, N, layout=gl.SliceLayout(0, L_S))
        m_seen = (i_key[None, :] <= i_token[:, None]) & (i_key[None, :] >= b_start[:, None])
        b_s = gl.where(m_seen, b_s, -float("inf"))
        b_new = gl.maximum(b_max, gl.max(b_s, 1) * scale_log2)
        b_safe = gl.where(b_new == -float("inf"), 0.0, b_new)  # nothing seen yet
        b_p = gl.exp2(b_s * scale_log2 - b_safe[:, None])
        b_shrink = gl.exp2(b_max - b_safe)
        s_p.store(b_p.to(d_k.dtype))
        fence_async_shared()
        L_T: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, b_sums.type.layout))
        b_sums = b_sums * gl.convert_layout(b_shrink, L_T)[:, None, None] + _thread_sums(b_p, M, N)
        b_out = b_out * gl.convert_layout(b_shrink, gl.SliceLayout(1, L_O))[:, None]
        t_o = warpgroup_mma(s_p.slice(0, H, dim=1), s_k.slice(0, H), b_out, is_async=True)
        t_o = warpgroup_mma(s_p.slice(H, H, dim=1), s_k.slice(H, H), t_o, is_async=True)
        more = tile + 1 < tiles
        b_max = warpgroup_mma_wait(num_outstanding=1, deps=[b_new])  # the first half of the tile is free
        mbarrier.expect(bars.index(0), H * L * 2, pred=more)
        _load(d_k, key + N, 0, bars.index(0), s_k.slice(0, H), more)
        b_out = warpgroup_mma_wait(num_outstanding=0, deps=[t_o])
        mbarrier.expect(bars.index(1), (H * L + N * R) * 2, pred=more)
        _load(d_k, key + N + H, 0, bars.index(1), s_k.slice(H, H), more)
        _load(d_kr, key + N, L, bars.index(1), s_kr, more)
    b_sum = gl.convert_layout(gl.sum(gl.sum(b_sums, 2), 1), gl.SliceLayout(1, L_S))
    gl.store(p_lse + i_row, b_max + gl.log2(b_sum), mask=i_row < rows)
    b_out = b_out / gl.convert_layout(b_sum, gl.SliceLayout(1, L_O))[:, None]
    _put(p_out, row, b_out, rows, 0, L, L_O)


@gluon.jit
def _query_grad_kernel(
    d_q, d_qr, d_k, d_kr, d_do, p_lse, p_delta, p_dq, p_start, rows, heads, scale, scale_log2,
    L: gl.constexpr, R: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = L + R
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, N // 2, 16])
    L_Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, L // 2, 16])
    L_R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, R // 2, 16])
    L_P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, N], d_k.dtype)
    s_qd = gl.allocate_shared_memory(d_k.dtype, [2 * M, L], d_q.layout)  # query, then output's gradient
    s_qr = gl.allocate_shared_memory(d_k.dtype, [M, R], d_qr.layout)
    s_k = gl.allocate_shared_memory(d_k.dtype, [2, N, L], d_k.layout)
    s_kr = gl.allocate_shared_memory(d_k.dtype, [2, N, R], d_kr.layout)
    s_both = gl.allocate_shared_memory(gl.float32, [2, M, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    s_y = s_both._reinterpret(gl.float32, [2 * M, N], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
    s_ds = s_both.index(0)._reinterpret(d_k.dtype, [M, N], L_P)
    bars = _barriers()
    row = (gl.num_programs(0) - 1 - gl.program_id(0)) * M
    last = (gl.minimum(row + M, rows) - 1) // heads
    first = gl.load(p_start + row // heads)
    tiles = (last - first) // N + 1
    mbarrier.expect(bars.index(2), M * (D + L) * 2)
    _load(d_q, row, 0, bars.index(2), s_qd.slice(0, M), True)
    _load(d_qr, row, L, bars.index(2), s_qr, True)
    _load(d_do, row, 0, bars.index(2), s_qd.slice(M, M), True)
    mbarrier.expect(bars.index(0), N * D * 2)
    _load(d_k, first, 0, bars.index(0), s_k.index(0), True)
    _load(d_kr, first, L, bars.index(0), s_kr.index(0), True)
    i_row = row + gl.arange(0, M, layout=gl.SliceLayout(1, L_S))
    m_row = i_row < rows
    i_token = i_row // heads
    b_start = gl.load(p_start + i_token, mask=m_row, other=0)
    b_lse = gl.load(p_lse + i_row, mask=m_row, other=float("inf"))
    b_delta = gl.load(p_delta + i_row, mask=m_row, other=0.0)
    t_dl = warpgroup_mma_init(gl.zeros([M, L], gl.float32, layout=L_O))
    t_dr = warpgroup_mma_init(gl.zeros([M, R], gl.float32, layout=L_R))
    b_zero = gl.zeros([M, N], gl.float32, layout=L_S)
    b_zeros = gl.zeros([2 * M, N], gl.float32, layout=L_Y)
    mbarrier.wait(bars.index(2), 0)
    for tile in range(0, tiles):
        now, key = tile % 2, first + tile * N
        mbarrier.wait(bars.index(now), (tile // 2) & 1)
        t_y = warpgroup_mma(s_qd, s_k.index(now).permute((1, 0)), b_zeros, use_acc=False, is_async=True)
        t_s = warpgroup_mma(s_qr, s_kr.index(now).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_dl, b_dr = warpgroup_mma_wait(num_outstanding=2, deps=[t_dl, t_dr])  # the other tile is free
        more = tile + 1 < tiles
        mbarrier.expect(bars.index(1 - now), N * D * 2, pred=more)
        _load(d_k, key + N, 0, bars.index(1 - now), s_k.index(1 - now), more)
        _load(d_kr, key + N, L, bars.index(1 - now), s_kr.index(1 - now), more)
        s_y.store(warpgroup_mma_wait(num_outstanding=1, deps=[t_y]))
        b_s = warpgroup_mma_wait(num_outstanding=0, deps=[t_s])
        b_s = b_s + s_y.slice(0, M).load(L_S)
        b_dp = s_y.slice(M, M).load(L_S)
        i_key = key + gl.arange(0, N, layout=gl.SliceLayout(0, L_S))
        m_seen = (i_key[None, :] <= i_token[:, None]) & (i_key[None, :] >= b_start[:, None])
        b_p = gl.exp2(b_s * scale_log2 - b_lse[:, None])
        b_ds = gl.where(m_seen, b_p * (b_dp - b_delta[:, None]), 0.0)
        gl.thread_barrier()  # s_ds lies in s_y
        s_ds.store(b_ds.to(d_k.dtype))
        fence_async_shared()
        t_dl = warpgroup_mma(s_ds, s_k.index(now), b_dl, is_async=True)
        t_dr = warpgroup_mma(s_ds, s_kr.index(now), b_dr, is_async=True)
    b_dl, b_dr = warpgroup_mma_wait(num_outstanding=0, deps=[t_dl, t_dr])
    _put(p_dq, row, b_dl * scale, rows, 0, D, L_O)
    _put(p_dq, row, b_dr * scale, rows, L, D, L_R)


@gluon.jit
def _latent_grad_kernel(
    d_q, d_qr, d_k, d_kr, d_do, p_lse, p_delta, p_parts, p_start, p_share, heads, scale, scale_log2,
    L: gl.constexpr, R: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = L + R
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, M // 2, 16])
    L_Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, M, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, L // 2, 16])
    L_R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, R // 2, 16])
    L_P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], d_k.dtype)
    s_k = gl.allocate_shared_memory(d_k.dtype, [N, L], d_k.layout)
    s_kr = gl.allocate_shared_memory(d_k.dtype, [N, R], d_kr.layout)
    s_qd = gl.allocate_shared_memory(d_k.dtype, [2, 2 * M, L], d_q.layout)
    s_qr = gl.allocate_shared_memory(d_k.dtype, [2, M, R], d_qr.layout)
    s_both = gl.allocate_shared_memory(gl.float32, [2, N, M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    s_y = s_both._reinterpret(gl.float32, [N, 2 * M], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    s_p = s_both.index(0)._reinterpret(d_k.dtype, [N, M], L_P)
    s_ds = s_both.index(1)._reinterpret(d_k.dtype, [N, M], L_P)
    bars = _barriers()
    p_mine = p_share + gl.program_id(0) * 4
    first, stop, slot = gl.load(p_mine + 1), gl.load(p_mine + 2), gl.load(p_mine + 3)
    key = gl.load(p_mine) * N
    tiles = (stop - first + M - 1) // M
    mbarrier.expect(bars.index(2), N * D * 2)
    _load(d_k, key, 0, bars.index(2), s_k, True)
    _load(d_kr, key, L, bars.index(2), s_kr, True)
    mbarrier.expect(bars.index(0), M * (D + L) * 2)
    _load(d_q, first, 0, bars.index(0), s_qd.index(0).slice(0, M), True)
    _load(d_qr, first, L, bars.index(0), s_qr.index(0), True)
    _load(d_do, first, 0, bars.index(0), s_qd.index(0).slice(M, M), True)
    i_key = key + gl.arange(0, N, layout=gl.SliceLayout(1, L_S))
    t_dl = warpgroup_mma_init(gl.zeros([N, L], gl.float32, layout=L_O))
    t_dr = warpgroup_mma_init(gl.zeros([N, R], gl.float32, layout=L_R))
    b_zero = gl.zeros([N, M], gl.float32, layout=L_S)
    b_zeros = gl.zeros([N, 2 * M], gl.float32, layout=L_Y)
    mbarrier.wait(bars.index(2), 0)
    for tile in range(0, tiles):
        now, row = tile % 2, first + tile * M
        i_row = row + gl.arange(0, M, layout=gl.SliceLayout(0, L_S))
        m_row = i_row < stop
        i_token = i_row // heads
        b_start = gl.load(p_start + i_token, mask=m_row, other=2147483647)
        b_lse = gl.load(p_lse + i_row, mask=m_row, other=float("inf"))
        b_delta = gl.load(p_delta + i_row, mask=m_row, other=0.0)
        mbarrier.wait(bars.index(now), (tile // 2) & 1)
        t_y = warpgroup_mma(s_k, s_qd.index(now).permute((1, 0)), b_zeros, use_acc=False, is_async=True)
        t_s = warpgroup_mma(s_kr, s_qr.index(now).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_dl, b_dr = warpgroup_mma_wait(num_outstanding=2, deps=[t_dl, t_dr])
        more = tile + 1 < tiles
        mbarrier.expect(bars.index(1 - now), M * (D + L) * 2, pred=more)
        _load(d_q, row + M, 0, bars.index(1 - now), s_qd.index(1 - now).slice(0, M), more)
        _load(d_qr, row + M, L, bars.index(1 - now), s_qr.index(1 - now), more)
        _load(d_do, row + M, 0, bars.index(1 - now), s_qd.index(1 - now).slice(M, M), more)
        s_y.store(warpgroup_mma_wait(num_outstanding=1, deps=[t_y]))
        b_s = warpgroup_mma_wait(num_outstanding=0, deps=[t_s])
        b_s = b_s + s_y.slice(0, M, dim=1).load(L_S)
        b_dp = s_y.slice(M, M, dim=1).load(L_S)
        m_seen = (i_key[:, None] <= i_token[None, :]) & (i_key[:, None] >= b_start[None, :])
        b_p = gl.where(m_seen, gl.exp2(b_s * scale_log2 - b_lse[None, :]), 0.0)
        b_ds = gl.where(m_seen, b_p * (b_dp - b_delta[None, :]) * scale, 0.0)
        gl.thread_barrier()  # s_p and s_ds lie in s_y
        s_p.store(b_p.to(d_k.dtype))
        s_ds.store(b_ds.to(d_k.dtype))
        fence_async_shared()
        t_dl = warpgroup_mma(s_p, s_qd.index(now).slice(M, M), b_dl, is_async=True)
        t_dl = warpgroup_mma(s_ds, s_qd.index(now).slice(0, M), t_dl, is_async=True)
        t_dr = warpgroup_mma(s_ds, s_qr.index(now), b_dr, is_async=True)
    b_dl, b_dr = warpgroup_mma_wait(num_outstanding=0, deps=[t_dl, t_dr])
    _put(p_parts, slot.to(gl.int64) * N, b_dl, (slot.to(gl.int64) + 1) * N, 0, D, L_O)
    _put(p_parts, slot.to(gl.int64) * N, b_dr, (slot.to(gl.int64) + 1) * N, L, D, L_R)


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if matrix.dtype is torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


def forward(
    query_TND: Tensor, latent_TD: Tensor, lengths: tuple[int, ...], scale: float, columns: int
) -> tuple[Tensor, Tensor]:
    """Output [T, N, L] and log2 of the softmax's denominator [T, N] float32, of contiguous inputs."""
    tokens, heads, width = query_TND.shape
    rows, rotated = query_TND.view(-1, width), width - columns
    out_TNL = query_TND.new_empty(tokens, heads, columns)
    lse_TN = query_TND.new_empty(tokens, heads, dtype=torch.float32)
    starts_T = schedule(lengths, heads, SHARE_KEYS, query_TND.device).starts_T
    _forward_kernel[(triton.cdiv(tokens * heads, ROWS),)](
        _descriptor(rows, ROWS, columns), _descriptor(rows, ROWS, rotated),
        _descriptor(latent_TD, FORWARD_KEYS // 2, columns), _descriptor(latent_TD, FORWARD_KEYS, rotated),
        out_TNL, lse_TN, starts_T, tokens * heads, heads, scale * LOG2_E,
        columns, rotated, ROWS, FORWARD_KEYS, num_warps=8,
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
    starts_T, shares_W4, first_B1 = schedule(lengths, heads, SHARE_KEYS, query_TND.device)
    delta_TN = row_dots(out_TNL, dout_TNL)
    dquery_TND = torch.empty_like(query_TND)
    parts_WBD = query_TND.new_empty(len(shares_W4), SHARE_KEYS, width, dtype=torch.float32)

    def tiles(rows: int, keys: int) -> list[TensorDescriptor]:
        matrix, dout = query_TND.view(-1, width), dout_TNL.view(-1, columns)
        wide = [_descriptor(x, n, columns) for x, n in ((matrix, rows), (latent_TD, keys), (dout, rows))]
        narrow = [_descriptor(x, n, width - columns) for x, n in ((matrix, rows), (latent_TD, keys))]
        return [wide[0], narrow[0], wide[1], narrow[1], wide[2]]

    _query_grad_kernel[(triton.cdiv(tokens * heads, ROWS),)](
        *tiles(ROWS, GRAD_KEYS), lse_TN, delta_TN, dquery_TND, starts_T, tokens * heads, heads,
        scale, scale * LOG2_E, columns, width - columns, ROWS, GRAD_KEYS, num_warps=8,
    )  # fmt: skip
    _latent_grad_kernel[(len(shares_W4),)](
        *tiles(SHARE_ROWS, SHARE_KEYS), lse_TN, delta_TN, parts_WBD, starts_T, shares_W4, heads,
        scale, scale * LOG2_E, columns, width - columns, SHARE_ROWS, SHARE_KEYS, num_warps=8,
    )  # fmt: skip
    return dquery_TND, sum_shares(parts_WBD, first_B1, latent_TD)
