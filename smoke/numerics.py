"""Error measures: relative norm, cosine, SQNR, distance in ulps, and the first bit that differs.

The first three accumulate in float64 whatever the operands' dtype, so that the measure adds no error of its own, and
return plain floats. In all of them the second argument is the reference. Two conventions settle the degenerate cases:
two zero (or empty) tensors agree perfectly, and a NaN in the data is a NaN in the measure, never a pass (every
comparison with NaN is false, so a limit must be tested as ``measure <= limit``, not as ``not measure > limit``).

The last two look at representations. ``first_mismatch`` compares bits, so -0 differs from +0, and a NaN equals the
NaN with the same payload only: that is what "to the last bit" means. ``ulp_distance`` counts representable values
between two numbers, so -0 equals +0, and the step from the largest finite value to infinity is one.

No tolerance lives here: limits belong to the recipe table.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

UNORDERED = torch.iinfo(torch.int64).max
"""What ``ulp_distance`` gives where exactly one of the two values is NaN."""

_INTEGER_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mismatch(NamedTuple):
    """Where two tensors of one shape first differ (row-major), the two bit patterns, and how many elements differ."""

    place: tuple[int, ...]
    left: str
    """Bits of the left element as ``0x...``, with all leading zeros."""
    right: str
    mismatches: int


def _same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")


def _float64(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors, flat and widened to float64."""
    _same_shape(a, b)
    return a.detach().reshape(-1).double(), b.detach().reshape(-1).double()


def _norm(a: Tensor) -> float:
    return float(torch.linalg.vector_norm(a))


def relative_norm(a: Tensor, b: Tensor) -> float:
    """``|a - b| / |b|`` (Euclidean). 0 where both are zero, inf where only the reference is. Shapes must be equal."""
    a, b = _float64(a, b)
    error, reference = _norm(a - b), _norm(b)
    if reference == 0.0:
        return error if error == 0.0 or math.isnan(error) else math.inf
    return error / reference


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of the angle between a and b, in [-1, 1]. 1 where both are zero, 0 where one is. Shapes must be equal."""
    a, b = _float64(a, b)
    left, right = _norm(a), _norm(b)
    if math.isnan(left) or math.isnan(right):
        return math.nan
    if left == 0.0 or right == 0.0:
        return 1.0 if left == right else 0.0
    value = float(torch.dot(a / left, b / right))
    return value if math.isnan(value) else max(-1.0, min(1.0, value))


def sqnr_db(a: Tensor, b: Tensor) -> float:
    """Signal to quantization noise, ``20 log10(|b| / |a - b|)`` in dB; inf where a equals b. Shapes must be equal."""
    ratio = relative_norm(a, b)
    if ratio == 0.0:
        return math.inf
    return -20.0 * math.log10(ratio) if math.isfinite(ratio) else -ratio


def _bits(a: Tensor) -> Tensor:
    """The elements' representations as integers of the same width (uint8 for one byte), same shape."""
    return a.detach().contiguous().view(_INTEGER_OF_BYTES[a.element_size()])


def _rank(a: Tensor) -> Tensor:
    """Position of each element among the representable values, int64; -0 and +0 share position 0."""
    bits = _bits(a)
    magnitude = (bits & torch.iinfo(bits.dtype).max).long()
    return torch.where(bits < 0, -magnitude, magnitude)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Representable steps between a and b, elementwise.

    Both bfloat16, or both float16, or both float32, of one shape; the result is int64 of that shape. Two NaN are 0
    apart; one NaN gives ``UNORDERED``. Raises ValueError for other shapes, TypeError for other dtypes.
    """
    _same_shape(a, b)
    if a.dtype is not b.dtype or a.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"ulp_distance takes two tensors of one 16 or 32 bit float type, got {a.dtype} and {b.dtype}")
    distance = (_rank(a) - _rank(b)).abs()
    nan_a, nan_b = a.detach().isnan(), b.detach().isnan()
    return distance.masked_fill(nan_a & nan_b, 0).masked_fill(nan_a ^ nan_b, UNORDERED)


def max_ulp(a: Tensor, b: Tensor) -> int:
    """The largest ``ulp_distance`` of any element; 0 for empty tensors."""
    return int(ulp_distance(a, b).max()) if a.numel() else 0


def first_mismatch(a: Tensor, b: Tensor) -> Mismatch | None:
    """Compare to the last bit; None where every bit is equal.

    Any real dtype, the same on both sides, of one shape and on one device. Raises ValueError for other shapes,
    TypeError where the dtypes differ.
    """
    _same_shape(a, b)
    if a.dtype is not b.dtype:
        raise TypeError(f"dtypes differ: {a.dtype} and {b.dtype}")
    left, right = _bits(a).reshape(-1), _bits(b).reshape(-1)
    if torch.equal(left, right):
        return None
    places = (left != right).nonzero().reshape(-1)
    first = int(places[0])
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), a.shape))
    return Mismatch(place, _hex(left[first]), _hex(right[first]), places.numel())


def _hex(bits: Tensor) -> str:
    size = bits.element_size()
    return f"0x{int(bits) % (1 << 8 * size):0{2 * size}x}"
