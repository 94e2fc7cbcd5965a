"""Delayed scaling: from running amaxes to the scales of the next step. Pure, and vectorised over slots."""

from __future__ import annotations

import torch
from torch import Tensor


def delayed_update(
    history: Tensor, scale: Tensor, format_max: Tensor | float, *, algorithm: str = "max", margin: int = 0
) -> tuple[Tensor, Tensor]:
    """New (history, scale), as Transformer Engine's fused kernel computes them.

    A slot whose running amax is zero was not quantized since the last update: it keeps its history and its scale. So
    does the scale of a slot whose amax is not finite.

    Args:
        history: float32 [..., L]; column 0 is the running amax since the last update, the newest old one is last.
        scale: float32 [...].
        format_max: largest number of the element format, for each slot or for all.
        algorithm: ``max`` of the window of L amaxes, or ``most_recent``.
        margin: powers of two of headroom.

    Raises:
        ValueError: the algorithm has another name.
    """
    if algorithm not in ("max", "most_recent"):
        raise ValueError(f"amax algorithm {algorithm!r}: max or most_recent")
    last = history[..., 0]
    window = torch.cat((history[..., 1:], last.unsqueeze(-1)), dim=-1)
    used = last != 0
    amax = window.amax(-1) if algorithm == "max" else last
    room = torch.as_tensor(format_max, dtype=torch.float32, device=scale.device) * 2.0**-margin
    wanted = (room / amax).clamp(max=torch.finfo(torch.float32).max)
    new_scale = torch.where(used & amax.isfinite() & (amax > 0), wanted, scale)
    shifted = window.clone()
    shifted[..., 0] = 0
    return torch.where(used.unsqueeze(-1), shifted, history), new_scale
