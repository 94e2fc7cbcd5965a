"""The definition of the joins of absorbed MLA: plain torch, any device.

``join`` puts unrotated columns (a latent, or a query that the K up-projection took to the latent's space) beside
rotated ones. Both parts have one type, and the result is rounded to that type *before* it is widened to ``out_dtype``:
widening changes no number, in the forward and (the gradient is rounded to the narrow type first) in the backward.

Why absorbed scores are those of the plain form: with k = W c for the latent c, q . k = q . (W c) = (W^T q) . c.

Shape letters: T tokens, N heads, L latent columns, R rotated columns, D = L + R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoke.kernels.mla_rope.reference import rotate
from smoke.kernels.mla_rope.tables import Tables


def join(latent_TNL: Tensor, pe_TNR: Tensor, tables: Tables, out_dtype: torch.dtype) -> Tensor:
    """latent [T, N, L], pe [T, N, R] -> [T, N, L + R]: the first as it is, the second rotated."""
    return torch.cat((latent_TNL, rotate(pe_TNR, tables).to(pe_TNR.dtype)), dim=-1).to(out_dtype)


def join_grad(dout_TND: Tensor, tables: Tables, rope_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gradients of ``join`` for inputs of type ``dtype``: dlatent [T, N, L] (may be a view of dout), dpe [T, N, R]."""
    dlatent_TNL, dpe_TNR = dout_TND.to(dtype).split((dout_TND.shape[-1] - rope_dim, rope_dim), dim=-1)
    return dlatent_TNL, rotate(dpe_TNR, tables, inverse=True).to(dtype)
