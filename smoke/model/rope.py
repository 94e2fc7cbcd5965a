"""Rotary position embedding as data: tables of cosines and sines, YaRN included, and positions of tokens.

Everything that makes one rotary embedding differ from another ends up in two tables and one number: the kernels
(``smoke.kernels.mla_rope``) look rows up by position and know nothing of YaRN, layouts or context parallelism.

YaRN, as DeepSeek-V3 uses it (Peng et al. 2023, with the two corrections of DeepSeek's and Megatron-core's code):

* frequencies that turn more than ``beta_fast`` times over the original context are kept, those that turn less than
  ``beta_slow`` times are divided by ``factor``, with a linear ramp over the pair index in between (the ends of the
  ramp rounded outwards to whole pairs);
* cos and sin are multiplied by m(mscale) / m(mscale_all_dim), with m(s) = 0.1 s ln(factor) + 1;
* the softmax scale is multiplied by m(mscale_all_dim) squared.

The tables are computed in float64 on the CPU and rounded to float32 once, so every device reads the same numbers. (Code
that computes the angle in float32 is off by up to position x 6e-8 radians.) A zero mscale_all_dim means m = 1, as in
DeepSeek's code; Hugging Face then ignores mscale as well.

Shape letters: P positions of the table, R rotated columns, B rows, S tokens of a row, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smoke.config import ModelConfig, RopeScaling


def rope_table(
    config: ModelConfig, device: torch.device | str | None = None, *, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [P, R/2], for positions 0 to P - 1; P is ``length`` or else max_position_embeddings.

    Column i belongs to the i-th rotated pair. YaRN's correction of the magnitude is already in both tables.

    Raises:
        ValueError: qk_rope_head_dim is odd, or ``length`` exceeds max_position_embeddings.
    """
    longest = config.max_position_embeddings
    length = longest if length is None else length
    if not 0 < length <= longest:
        raise ValueError(
            f"a rope table of {length} positions: --model.max_position_embeddings {longest} allows 1 to {longest}"
        )
    frequencies_R = inverse_frequencies(config)
    angles_PR = torch.outer(torch.arange(length, dtype=torch.float64), frequencies_R)
    magnitude = table_magnitude(config.rope_scaling)
    cos_PR, sin_PR = ((f(angles_PR) * magnitude).to(torch.float32).to(device) for f in (torch.cos, torch.sin))
    return cos_PR, sin_PR


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position turns each rotated pair by, float64 [R/2]."""
    width, scaling = config.qk_rope_head_dim, config.rope_scaling
    if width < 2 or width % 2:
        legal = f"{max(2, width - 1)} or {width + 1}" if width > 1 else "2"
        raise ValueError(
            f"--model.qk_rope_head_dim {width}: columns are rotated in pairs; the nearest legal is {legal}"
        )
    plain_R = config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if scaling is None:
        return plain_R
    low, high = correction_range(scaling, width, config.rope_theta)
    pairs_R = torch.arange(width // 2, dtype=torch.float64)
    stretched_R = ((pairs_R - low) / (high - low)).clamp(0, 1)
    return plain_R * (1 - stretched_R) + plain_R / scaling.factor * stretched_R


def correction_range(scaling: RopeScaling, width: int, theta: float) -> tuple[float, float]:
    """Pair indices where YaRN's ramp starts (frequency kept) and ends (frequency divided by the factor)."""

    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_max_position_embeddings / times
        return width * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), width - 1)
    return low, high if high != low else high + 0.001  # the published code's guard against an empty ramp


def table_magnitude(scaling: RopeScaling | None) -> float:
    """The factor on cos and sin: m(mscale) / m(mscale_all_dim); 1 without YaRN."""
    if scaling is None:
        return 1.0
    return _m(scaling.factor, scaling.mscale) / _m(scaling.factor, scaling.mscale_all_dim)


def softmax_scale(config: ModelConfig) -> float:
    """The factor on attention scores: m(mscale_all_dim)^2 / sqrt(nope + rope columns), for both forms of MLA."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    scaling = config.rope_scaling
    return scale if scaling is None else scale * _m(scaling.factor, scaling.mscale_all_dim) ** 2


def _m(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def positions_sbhd(rows: int, length: int, device: torch.device | str | None = None) -> Tensor:
    """Positions of a batch of fixed rows: 0 to length - 1 in every row, int64 [B, S]."""
    return torch.arange(length, device=device).repeat(rows, 1)


def positions_packed(cu_seqlens: Tensor) -> Tensor:
    """Positions of packed sequences, restarting at 0 at every edge: cu_seqlens int [n + 1] -> int64 [T].

    Raises:
        ValueError: the edges do not start at 0 or do not rise.
    """
    edges = cu_seqlens.to(torch.int64)
    lengths = edges.diff()
    if edges.dim() != 1 or edges.numel() < 2 or edges[0] != 0 or (lengths < 0).any():
        raise ValueError(f"cu_seqlens {cu_seqlens.tolist()} must be one row that starts at 0 and rises")
    starts_T = torch.repeat_interleave(edges[:-1], lengths)
    return torch.arange(starts_T.numel(), device=edges.device) - starts_T


def positions_context_parallel(
    length: int, cp_size: int, cp_rank: int, device: torch.device | str | None = None
) -> Tensor:
    """Positions that one context-parallel rank holds of a sequence of ``length`` tokens, int64 [length / cp_size].

    Megatron's zig-zag: the sequence is cut into 2 cp_size chunks and rank r takes chunks r and 2 cp_size - 1 - r, so
    that causal attention costs every rank the same.

    Raises:
        ValueError: the rank does not exist, or the length is no multiple of 2 cp_size.
    """
    if cp_size < 1 or not 0 <= cp_rank < cp_size:
        raise ValueError(f"context-parallel rank {cp_rank} of {cp_size}: ranks are 0 to cp_size - 1")
    chunks = 2 * cp_size
    if length < chunks or length % chunks:
        below, above = max(1, length // chunks) * chunks, (length // chunks + 1) * chunks
        legal = f"{below} or {above}" if length > chunks else str(chunks)
        raise ValueError(
            f"{length} tokens over {cp_size} context-parallel ranks: the zig-zag needs a multiple of {chunks}; "
            f"the nearest legal is {legal}"
        )
    chunks_CS = torch.arange(length, device=device).view(chunks, -1)
    return torch.cat([chunks_CS[cp_rank], chunks_CS[chunks - 1 - cp_rank]])
