"""An oracle of the rotary embedding that shares no code with it.

Every rotated pair is a complex number a + bi; a position multiplies it by one complex number, which holds the angle and
YaRN's magnitude. Those numbers are computed one by one with ``math``, in float64, from the formulas of YaRN and of
DeepSeek-V3 (``smoke.model.rope`` names them): slow, and short enough to be checked by eye.

Shape letters: T tokens, N heads, C columns that are copied, R rotated columns.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from smoke.config import ModelConfig, RopeScaling


def turn(config: ModelConfig, position: int, pair: int) -> complex:
    """What ``position`` multiplies the rotated pair ``pair`` by."""
    scaling = config.rope_scaling
    frequency, magnitude = config.rope_theta ** (-2.0 * pair / config.qk_rope_head_dim), 1.0
    if scaling is not None:
        kept = _kept(config, scaling, pair)
        frequency = kept * frequency + (1.0 - kept) * frequency / scaling.factor
        magnitude = _correction(scaling, scaling.mscale) / _correction(scaling, scaling.mscale_all_dim)
    return magnitude * cmath.exp(1j * position * frequency)


def softmax_scale(config: ModelConfig) -> float:
    """The factor on attention scores."""
    scaling, width = config.rope_scaling, config.qk_nope_head_dim + config.qk_rope_head_dim
    correction = 1.0 if scaling is None else _correction(scaling, scaling.mscale_all_dim)
    return correction * correction / math.sqrt(width)


def turns(config: ModelConfig, positions: Sequence[int]) -> Tensor:
    """``turn`` of every position and pair, complex128 [T, R/2]."""
    pairs = range(config.qk_rope_head_dim // 2)
    return torch.tensor([[turn(config, p, i) for i in pairs] for p in positions], dtype=torch.complex128)


def joined(copied_TNC: Tensor, pe_TNR: Tensor, turns_TR: Tensor) -> Tensor:
    """Copied columns beside rotated ones, float64 [T, N, C + R]: pairs of neighbours come in, halves come out."""
    pairs_TNR = torch.view_as_complex(pe_TNR.double().unflatten(-1, (-1, 2)).contiguous())
    turned_TNR = pairs_TNR * turns_TR.unsqueeze(1)
    return torch.cat((copied_TNC.double(), turned_TNR.real, turned_TNR.imag), dim=-1)


def turned_back(dout_TNR: Tensor, turns_TR: Tensor) -> Tensor:
    """Gradient of the rotated columns, float64 [T, N, R]: halves come in, pairs of neighbours come out."""
    pairs_TNR = torch.complex(*dout_TNR.double().chunk(2, dim=-1)) * turns_TR.conj().unsqueeze(1)
    return torch.view_as_real(pairs_TNR).flatten(-2)


def _kept(config: ModelConfig, scaling: RopeScaling, pair: int) -> float:
    """Share of a pair's own frequency that YaRN keeps: 1 for fast pairs, 0 for slow ones, a ramp in between."""
    width, context = config.qk_rope_head_dim, scaling.original_max_position_embeddings

    def pair_of(rotations: float) -> float:
        return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = max(math.floor(pair_of(scaling.beta_fast)), 0), min(math.ceil(pair_of(scaling.beta_slow)), width - 1)
    return 1.0 - min(max((pair - first) / (last - first or 0.001), 0.0), 1.0)


def _correction(scaling: RopeScaling, mscale: float) -> float:
    return 1.0 if scaling.factor <= 1 else 1.0 + 0.1 * mscale * math.log(scaling.factor)
