"""Element casts and the Hadamard transform: float32 to codes and back, as NVIDIA's conversion instructions round.

All casts round to nearest even and saturate to the largest finite number; only NaN stays NaN (E2M1 has none: +6). The
narrow casts of torch are used after clamping alone, because what they do beyond the largest number depends on the
version, and E8M0 scales are built from bits, because torch rounds them to nearest.

Shape letters: M rows, K columns.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from smoke.kernels.quantize.spec import Format

_TORCH_TYPES = {Format.E4M3: torch.float8_e4m3fn, Format.E5M2: torch.float8_e5m2}
NAN_CODE_FP8 = 0x7F
NAN_CODE_E2M1 = 0x7

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_UP_ON_TIE = (0.75, 1.75, 3.5)
"""Midpoints that round up, to the number with the even code; the other midpoints (below) round down."""
_E2M1_DOWN_ON_TIE = (0.25, 1.25, 2.5, 5.0)

HADAMARD_GROUP = 16
HADAMARD_NEGATIVE = 0xD7E8
"""Bit i is set where the random sign of row i is -1: the fixed vector of Transformer Engine."""


def encode(y: Tensor, format: Format) -> Tensor:
    """Codes (uint8) of float32 numbers: nearest even, saturating. E2M1 has one code in each byte, 0 to 15."""
    if format is Format.E2M1:
        return _sign_and_nan(y, _encode_e2m1(y.abs()))
    largest = format.value.largest
    codes = y.clamp(-largest, largest).to(_TORCH_TYPES[format]).view(torch.uint8)
    return torch.where(y.isnan(), NAN_CODE_FP8, codes)


def _encode_e2m1(magnitude: Tensor) -> Tensor:
    codes = torch.zeros(magnitude.shape, dtype=torch.uint8, device=magnitude.device)
    for midpoint in _E2M1_UP_ON_TIE:
        codes += magnitude >= midpoint
    for midpoint in _E2M1_DOWN_ON_TIE:
        codes += magnitude > midpoint
    return codes


def _sign_and_nan(y: Tensor, codes: Tensor) -> Tensor:
    signed = codes + 8 * y.signbit().to(torch.uint8)
    return torch.where(y.isnan(), NAN_CODE_E2M1, signed)


def encode_stochastic(y: Tensor, random_bits: Tensor) -> Tensor:
    """E2M1 codes, rounded up with the probability of the distance. ``random_bits``: uint8, the shape of y.

    A number on the grid never moves. The eight bits are a fraction u of the spacing: floor(|y| + u * spacing).
    """
    magnitude = y.abs()
    jittered = magnitude + random_bits.to(torch.float32) / 256 * _e2m1_spacing(magnitude)
    spacing = _e2m1_spacing(jittered)
    return _sign_and_nan(y, _encode_e2m1((torch.floor(jittered / spacing) * spacing).clamp(max=6.0)))


def _e2m1_spacing(magnitude: Tensor) -> Tensor:
    return 0.5 + 0.5 * (magnitude >= 2) + (magnitude >= 4)


def decode(codes: Tensor, format: Format) -> Tensor:
    """float32 numbers of codes."""
    if format is not Format.E2M1:
        return codes.view(_TORCH_TYPES[format]).float()
    return _e2m1_table(codes.device)[codes.int()]


@functools.cache
def _e2m1_table(device: torch.device) -> Tensor:
    return torch.tensor(_E2M1_VALUES + tuple(-v for v in _E2M1_VALUES), device=device)


def power_of_two(exponent: Tensor) -> Tensor:
    """float32 2^exponent for int32 exponents of -127 (subnormal) to 127."""
    return torch.where(exponent >= -126, (exponent + 127) << 23, 1 << 22).to(torch.int32).view(torch.float32)


def e8m0_up(v: Tensor) -> Tensor:
    """E8M0 codes (int32) of non-negative float32 numbers, rounded toward +inf and saturated at 254.

    Code c is 2^(c - 127); zero and everything up to 2^-127 get code 0.
    """
    bits = v.view(torch.int32)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    codes = torch.where(exponent > 0, exponent + (fraction > 0), (fraction > 0x400000).int())
    return codes.clamp(max=254)


@functools.cache
def _quarter_signs(device: torch.device) -> Tensor:
    signs = [-0.25 if HADAMARD_NEGATIVE >> i & 1 else 0.25 for i in range(HADAMARD_GROUP)]
    return torch.tensor(signs, dtype=torch.float64, device=device).view(1, HADAMARD_GROUP, 1)


def hadamard(x_MK: Tensor) -> Tensor:
    """Groups of 16 rows times ``diag(signs) H16 / 4`` (Sylvester order), rounded to BF16. M is a multiple of 16.

    The sums are taken in float64, in the fixed order of the fast transform: exact unless a group spans more than 2^40,
    and the same bits on every device. (The hardware sums in float32, in an order of its own.)
    """
    m, k = x_MK.shape
    y = x_MK.reshape(m // HADAMARD_GROUP, HADAMARD_GROUP, k) * _quarter_signs(x_MK.device)
    other = torch.empty_like(y)
    half = 1
    while half < HADAMARD_GROUP:
        shape = (-1, 2, half, k)
        source, target = y.view(shape), other.view(shape)
        torch.add(source[:, 0], source[:, 1], out=target[:, 0])
        torch.sub(source[:, 0], source[:, 1], out=target[:, 1])
        y, other = other, y
        half *= 2
    return y.float().bfloat16().view(m, k)
