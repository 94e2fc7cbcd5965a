"""Absorbed attention by its definition: every query head meets one shared latent, which is key and value at once.

    scores[t, n, k] = scale * query[t, n] . latent[k]            k in t's sequence, k <= t
    out[t, n]       = softmax_k(scores[t, n]) . latent[k, :columns]

Computed in float32 (float64 for float64), one sequence after the other. It keeps every probability: N * S * S numbers
for a sequence of S tokens, so it is a definition to test against, not a way to train.

Shape letters: T tokens, N query heads, D width (latent and rotated columns), L latent columns, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attend(
    query_TND: Tensor, latent_TD: Tensor, *, lengths: Sequence[int], scale: float, columns: int
) -> tuple[Tensor, Tensor]:
    """Output [T, N, columns] in the query's dtype, and log2 of the softmax's denominator [T, N] (wide dtype)."""
    wide = torch.float64 if query_TND.dtype is torch.float64 else torch.float32
    outs, sums = [], []
    for query_SND, latent_SD in zip(query_TND.split(list(lengths)), latent_TD.split(list(lengths)), strict=True):
        latent_SD = latent_SD.to(wide)
        scores_SNS = torch.einsum("snd,kd->snk", query_SND.to(wide), latent_SD) * scale
        token_S = torch.arange(latent_SD.shape[0], device=latent_SD.device)
        scores_SNS = scores_SNS.masked_fill((token_S > token_S[:, None])[:, None], -torch.inf)
        outs.append(torch.einsum("snk,kl->snl", scores_SNS.softmax(-1), latent_SD[:, :columns]))
        sums.append(torch.logsumexp(scores_SNS, -1) / torch.log(scores_SNS.new_tensor(2.0)))
    return torch.cat(outs).to(query_TND.dtype), torch.cat(sums)
