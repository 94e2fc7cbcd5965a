"""Query and key of absorbed MLA: the K up-projection moves to the query, all heads share one key.

The per-head product belongs to a leaf of the model (its precision is a policy of its own), so it comes in as a
callable; splitting, rotating and joining are done here. ``reference`` is the definition; with ``impl`` triton one
kernel of ``mla_rope`` writes both parts of the joined tensor.

``out_dtype`` is for attention cores that take a wider type than the model computes in (float32 on CPUs without BF16
instructions): the last operation then widens numbers that were rounded to the narrow type already.

Shape letters: T tokens, N heads, K nope columns, R rotated columns, L latent columns, D = L + R.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smoke.kernels.absorb import reference
from smoke.kernels.mla_rope.api import checked_tables, implementation
from smoke.kernels.mla_rope.tables import Tables


def absorbed_query(
    q_TND: Tensor,
    k_up: Callable[[Tensor], Tensor],
    *,
    nope_dim: int,
    cos: Tensor,
    sin: Tensor,
    positions_T: Tensor,
    impl: str = "reference",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """q [T, N, nope_dim + R] -> [T, N, L + R]: ``k_up`` of the first columns, the rotated last columns.

    Args:
        k_up: the per-head product, [T, N, nope_dim] -> [T, N, L], differentiable.
        nope_dim: unrotated columns of q.
        cos, sin, positions_T, impl: as in ``smoke.kernels.mla_rope.api.rope_query``.
        out_dtype: type of the result; default that of q.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot run here.
    """
    if q_TND.dim() != 3 or not 0 <= nope_dim < q_TND.shape[-1]:
        raise ValueError(f"nope_dim {nope_dim}: q {tuple(q_TND.shape)} must be [tokens, heads, nope_dim + rotated]")
    nope_TNK, pe_TNR = q_TND.split((nope_dim, q_TND.shape[-1] - nope_dim), dim=-1)
    return _join(k_up(nope_TNK), pe_TNR, (cos, sin, positions_T), impl, out_dtype)


def absorbed_key(
    latent_TL: Tensor,
    k_pe_TR: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    positions_T: Tensor,
    impl: str = "reference",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """latent [T, L], k_pe [T, R] -> the one key of all heads, [T, 1, L + R]. Arguments as in ``absorbed_query``."""
    if latent_TL.dim() != 2 or k_pe_TR.dim() != 2:
        raise ValueError(
            f"latent {tuple(latent_TL.shape)} and k_pe {tuple(k_pe_TR.shape)}: both must be [tokens, columns]"
        )
    return _join(latent_TL.unsqueeze(1), k_pe_TR.unsqueeze(1), (cos, sin, positions_T), impl, out_dtype)


def _join(
    latent_TNL: Tensor,
    pe_TNR: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    impl: str,
    out_dtype: torch.dtype | None,
) -> Tensor:
    if latent_TNL.shape[:-1] != pe_TNR.shape[:-1] or latent_TNL.dtype != pe_TNR.dtype:
        raise ValueError(
            f"latent part {tuple(latent_TNL.shape)} {latent_TNL.dtype} beside rotated part {tuple(pe_TNR.shape)} "
            f"{pe_TNR.dtype}: all but their columns must agree"
        )
    checked = checked_tables(*tables, pe_TNR.shape[-1], pe_TNR)
    # One kernel of mla_rope serves both rooms; the reference of the join is this room's own.
    module = reference if impl == "reference" else implementation(impl, pe_TNR.device)
    return _Join.apply(latent_TNL, pe_TNR, *checked, out_dtype or pe_TNR.dtype, module)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, latent_TNL: Tensor, pe_TNR: Tensor, cos, sin, positions, out_dtype, impl: ModuleType) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        ctx.rope_dim, ctx.dtype, ctx.impl = pe_TNR.shape[-1], pe_TNR.dtype, impl
        return impl.join(latent_TNL, pe_TNR, Tables(cos, sin, positions), out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_TND: Tensor):
        grads = ctx.impl.join_grad(dout_TND, Tables(*ctx.saved_tensors), ctx.rope_dim, ctx.dtype)
        return *grads, None, None, None, None, None
