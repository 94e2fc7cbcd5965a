"""MLA's rotary embedding, differentiable, by the implementation asked for: ``reference`` or ``triton``.

Two operations: ``rope_query`` rotates the last columns of every query head; ``rope_key_value`` (the plain form of MLA)
joins every head's key with the one rotated key they share, and separates the values. What they compute is defined in
``reference``; both implementations offer the same functions, and the gradients are explicit (the inverse rotation), so
that only the tables and the positions are saved.

Positions are one int64 for each token: packed sequences and context-parallel shards differ in that tensor alone
(``smoke.model.rope``). On a CPU positions are checked against the table's length; on a GPU that would stop the stream,
and there a position beyond the table gives NaN (triton) or torch's own device assertion (reference).

Shape letters: T tokens, N heads, D head columns, R rotated columns, C and V columns that are copied, P rows of the
tables.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smoke.kernels.mla_rope import reference
from smoke.kernels.mla_rope.tables import Tables
from smoke.kernels.support import triton_missing


def rope_query(
    q_TND: Tensor, cos: Tensor, sin: Tensor, positions_T: Tensor, *, rope_dim: int, impl: str = "reference"
) -> Tensor:
    """q [T, N, D] of any strides -> a new [T, N, D]: the last ``rope_dim`` columns rotated, the first copied.

    Args:
        cos, sin: float tables [P, rope_dim / 2] (``smoke.model.rope.rope_table``).
        positions_T: row of the tables for each token, int64.
        rope_dim: rotated columns, even.
        impl: reference or triton.

    Raises:
        ValueError: shapes that do not fit, a position beyond the table (CPU), or an implementation that cannot run.
    """
    _check_heads("q", q_TND)
    tables = checked_tables(cos, sin, positions_T, rope_dim, q_TND)
    if rope_dim > q_TND.shape[-1]:
        raise ValueError(
            f"rope_dim {rope_dim}: q has {q_TND.shape[-1]} columns; the nearest legal is {q_TND.shape[-1] // 2 * 2}"
        )
    return _Query.apply(q_TND, *tables, rope_dim, implementation(impl, q_TND.device))


def rope_key_value(
    kv_TNC: Tensor,
    k_pe_TR: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions_T: Tensor,
    *,
    nope_dim: int,
    v_dim: int,
    impl: str = "reference",
) -> tuple[Tensor, Tensor]:
    """kv [T, N, nope_dim + v_dim], k_pe [T, R] -> key [T, N, nope_dim + R], value [T, N, v_dim], both new tensors.

    Every head's key ends in the same rotated k_pe; its gradient is the sum over the heads, in float32 and in an order
    that does not change from run to run. Arguments and errors as in ``rope_query``.
    """
    _check_heads("kv", kv_TNC)
    if k_pe_TR.dim() != 2 or k_pe_TR.shape[0] != kv_TNC.shape[0] or k_pe_TR.dtype != kv_TNC.dtype:
        raise ValueError(
            f"k_pe {tuple(k_pe_TR.shape)} {k_pe_TR.dtype}: kv {tuple(kv_TNC.shape)} {kv_TNC.dtype} takes "
            f"[{kv_TNC.shape[0]}, R] of the same type"
        )
    if nope_dim < 0 or v_dim < 0 or nope_dim + v_dim != kv_TNC.shape[-1]:
        raise ValueError(
            f"nope_dim {nope_dim} + v_dim {v_dim}: kv has {kv_TNC.shape[-1]} columns; "
            f"for this nope_dim v_dim is {kv_TNC.shape[-1] - nope_dim}"
        )
    tables = checked_tables(cos, sin, positions_T, k_pe_TR.shape[-1], kv_TNC)
    return _KeyValue.apply(kv_TNC, k_pe_TR, *tables, nope_dim, implementation(impl, kv_TNC.device))


class _Query(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TND: Tensor, cos, sin, positions, rope_dim: int, impl: ModuleType) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        ctx.rope_dim, ctx.impl = rope_dim, impl
        return impl.query(q_TND, Tables(cos, sin, positions), rope_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_TND: Tensor):
        dq_TND = ctx.impl.query(dout_TND, Tables(*ctx.saved_tensors), ctx.rope_dim, inverse=True)
        return dq_TND, None, None, None, None, None


class _KeyValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv_TNC: Tensor, k_pe_TR: Tensor, cos, sin, positions, nope_dim: int, impl: ModuleType):
        ctx.save_for_backward(cos, sin, positions)
        ctx.nope_dim, ctx.impl = nope_dim, impl
        return impl.key_value(kv_TNC, k_pe_TR, Tables(cos, sin, positions), nope_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, dkey_TND: Tensor, dvalue_TNV: Tensor):
        tables = Tables(*ctx.saved_tensors)
        dkv_TNC, dk_pe_TR = ctx.impl.key_value_grad(dkey_TND, dvalue_TNV, tables, ctx.nope_dim)
        return dkv_TNC, dk_pe_TR, None, None, None, None, None


def implementation(impl: str, device: torch.device) -> ModuleType:
    """The module that offers the functions of ``reference``; Triton is imported only when it is asked for.

    Raises:
        ValueError: an unknown word, or Triton where it cannot run (not installed, or a CPU without its interpreter).
    """
    if impl == "reference":
        return reference
    if impl != "triton":
        raise ValueError(f"impl {impl!r}: there are reference and triton")
    if triton_missing():
        raise ValueError(f"impl triton: {triton_missing()}; impl reference runs everywhere")
    import smoke.kernels.mla_rope.triton as triton

    if device.type != "cuda" and not triton.interpreted():
        raise ValueError(
            f"impl triton: the tensors are on {device.type}; Triton needs a GPU (or its interpreter, "
            "TRITON_INTERPRET=1 before the first import); impl reference runs everywhere"
        )
    return triton


def checked_tables(cos: Tensor, sin: Tensor, positions_T: Tensor, rope_dim: int, x: Tensor) -> Tables:
    """The tables, if they fit ``rope_dim`` rotated columns of ``x`` [T, ...]; else a ValueError says what would."""
    if rope_dim < 2 or rope_dim % 2:
        legal = f"{rope_dim - 1} or {rope_dim + 1}" if rope_dim > 2 else "2"
        raise ValueError(f"{rope_dim} rotated columns: they are rotated in pairs; the nearest legal is {legal}")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[-1] != rope_dim // 2:
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)}: {rope_dim} rotated columns take two tables "
            f"[positions, {rope_dim // 2}], one column for each pair"
        )
    if positions_T.dtype != torch.int64 or positions_T.shape != x.shape[:1]:
        raise ValueError(
            f"positions {tuple(positions_T.shape)} {positions_T.dtype}: {x.shape[0]} tokens take "
            f"[{x.shape[0]}] of torch.int64"
        )
    devices = {str(t.device) for t in (x, cos, sin, positions_T)}
    if len(devices) > 1:
        raise ValueError(f"tensors, tables and positions are on {', '.join(sorted(devices))}; they must be on one")
    if positions_T.device.type == "cpu" and positions_T.numel():
        low, high = (int(bound) for bound in positions_T.aminmax())
        if low < 0 or high >= cos.shape[0]:
            raise ValueError(f"positions {low} to {high}: the tables hold 0 to {cos.shape[0] - 1}")
    return Tables(cos, sin, positions_T)


def _check_heads(name: str, x: Tensor) -> None:
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"{name} {tuple(x.shape)} {x.dtype}: it must be [tokens, heads, columns] of a floating type")
