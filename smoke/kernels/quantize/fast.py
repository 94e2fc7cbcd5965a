"""The same numbers as the definition, for BF16 matrices on a CPU, in few passes over cache-sized pieces.

Three ideas carry it:

* Magnitudes of BF16 numbers order like their bits, so an amax is an integer maximum, and scales that are powers of two
  come out of it by integer arithmetic.
* Adding C = 1.5 * 2^E to a number and subtracting it again rounds to nearest even at the last place of C. With the E of
  each element's own exponent, but not below the format's smallest exponent, that is the cast to the element grid.
* Where scales are powers of two and nothing leaves the exponent range, scaling is not needed at all: x itself is
  rounded at the place that the scale implies, in BF16 arithmetic (which torch rounds once, from float32).

Whatever does not fit (NaN, inf, blocks near the ends of the exponent range) returns None, and the caller takes the
definition. A training step makes a thousand small calls, so scalars are Python numbers, rounded to float32 after every
operation (float64 holds the exact product, and a quotient rounded twice is rounded right), and the integer constants
are tensors made once. Scratch is allocated anew in each call, small enough that the allocator hands it out again
without page faults.

Shape letters: M rows, K columns.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from smoke.kernels.quantize.casts import HADAMARD_GROUP, hadamard
from smoke.kernels.quantize.reference import FLOAT32_MAX, NV_LARGEST
from smoke.kernels.quantize.spec import Direction, Format, Spec

CHUNK = 1 << 17
"""Elements in a piece: two int16 buffers of it fit in the second-level caches of two cores (tuned on a Zen 3)."""
WHOLE = 8 * CHUNK
"""Matrices up to this size stay whole: there the number of calls costs more than the caches save."""
BF16_INF = 0x7F80
FLOAT32_EXPONENT, FLOAT32_HALF = 0x7F800000, 1 << 22


def takes(x_MK: Tensor) -> bool:
    """Whether this file can quantize x at all."""
    return x_MK.dtype is torch.bfloat16 and x_MK.is_cpu and x_MK.numel() > 0


@functools.cache
def _int16(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int16, device="cpu")


@functools.cache
def _int32(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device="cpu")


def float32(value: float) -> float:
    """A Python number rounded to float32, where too large ones become the largest."""
    return struct.unpack("f", struct.pack("f", min(value, FLOAT32_MAX)))[0]


def amax(x: Tensor) -> float | None:
    """The largest magnitude of a contiguous tensor (inf counts); None where there is a NaN."""
    largest = 0
    for piece in _split(x.view(torch.int16)):
        largest = max(largest, int(torch.bitwise_and(piece, _int16(0x7FFF)).max()))
    if largest > BF16_INF:
        return None
    return struct.unpack("f", struct.pack("i", largest << 16))[0]


def _split(x: Tensor) -> tuple[Tensor, ...]:
    return (x,) if x.numel() <= WHOLE else x.view(-1).split(CHUNK)


def _pieces(block: tuple[int, int], *tensors_MK: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching 4-D views [row blocks, rows, column blocks, columns] of the tensors; partial blocks come last."""
    (m, k), (rows, columns) = tensors_MK[0].shape, block
    whole_m, whole_k = m - m % rows, k - k % columns
    if m * k <= WHOLE and whole_m == m and whole_k == k:
        yield tuple(tensor.view(-1, rows, k // columns, columns) for tensor in tensors_MK)
        return
    for left, right, width in ((0, whole_k, columns), (whole_k, k, k - whole_k)):
        if left == right:
            continue
        step = max(rows, CHUNK // (right - left) // rows * rows)
        starts = [(top, min(top + step, whole_m), rows) for top in range(0, whole_m, step)]
        for top, bottom, height in (*starts, (whole_m, m, m - whole_m)):
            if top < bottom:
                parts = (tensor[top:bottom, left:right] for tensor in tensors_MK)
                yield tuple(part.unflatten(0, (-1, height)).unflatten(2, (-1, width)) for part in parts)


def _block_amax(magnitude: Tensor) -> Tensor:
    """Largest of each block of a 4-D view, with the block dimensions kept as ones."""
    if magnitude.shape[1] > 1:
        magnitude = magnitude.amax(1, keepdim=True)
    return magnitude.amax(3, keepdim=True) if magnitude.shape[3] > 1 else magnitude


class _Bits(NamedTuple):
    """What rounding in BF16 arithmetic needs to know of an element format, as BF16 bits."""

    to_floor: Tensor
    """Added to amax bits, and cut to the exponent, gives the smallest normal exponent that the block's scale implies.
    The 0x1F carries where the fraction of amax is above that of 448 and 57344 (1.75: 0x60)."""
    to_magic: Tensor
    """Added to an exponent, gives the C that rounds there."""
    highest: int
    """Floors above this would make C overflow."""


@functools.cache
def _bits(format: Format) -> _Bits:
    grid = format.value
    down = grid.largest_exponent - grid.min_exponent
    up = 7 - grid.mantissa_bits
    return _Bits(_int16(0x1F - (down << 7)), _int16(up << 7 | 0x40), 254 - up - down << 7)


LOWEST = 1 << 7
"""Floors below this leave the normal numbers of BF16."""


def power_of_two_blocks(x_MK: Tensor, format: Format, block: tuple[int, int]) -> Tensor | None:
    """Dequantized BF16 values of mx and 128-blocks: each scale is the power of two next above amax / max."""
    out_MK = torch.empty_like(x_MK)
    constants = _bits(format)
    for x, out in _pieces(block, x_MK, out_MK):
        if not _round_blocks(x, out, constants):
            return None
    return out_MK


def _round_blocks(x: Tensor, out: Tensor, constants: _Bits) -> bool:
    """Round one piece into ``out``; False where a block lies outside the exponents that BF16 arithmetic can do."""
    bits = x.view(torch.int16)
    scratch = torch.bitwise_and(bits, _int16(0x7FFF))
    amax_bits = _block_amax(scratch)
    floor = torch.add(amax_bits, constants.to_floor)
    torch.bitwise_and(floor, _int16(-128), out=floor)
    low, high = floor.aminmax()
    if high.item() > constants.highest:
        return False
    if low.item() < LOWEST:
        if ((floor < LOWEST) & (amax_bits > 0)).any():
            return False
        floor.clamp_(min=LOWEST)
    torch.bitwise_and(bits, _int16(BF16_INF), out=scratch)
    torch.maximum(scratch, floor, out=scratch)
    torch.add(scratch, constants.to_magic, out=scratch)
    magic = scratch.view(torch.bfloat16)
    torch.add(x, magic, out=out)
    torch.sub(out, magic, out=out)
    torch.copysign(out, x, out=out)
    return True


def current_scale(amax_: float, spec: Spec) -> float:
    """max / amax as float32 (a power of two where the spec says so); 1 where amax is zero or infinite."""
    if not 0 < amax_ <= FLOAT32_MAX:
        return 1.0
    scale = float32(spec.format.value.largest / amax_)
    if spec.power_of_two:
        (bits,) = struct.unpack("i", struct.pack("f", scale))
        (scale,) = struct.unpack("f", struct.pack("i", bits & FLOAT32_EXPONENT))
    return scale


def tensor_scaled(x_MK: Tensor, format: Format, scale: Tensor | float) -> Tensor:
    """BF16 numbers of the codes of x * scale (float32); NaN stays NaN."""
    out_MK = torch.empty_like(x_MK)
    largest = format.value.largest
    for x, out in zip(_split(x_MK), _split(out_MK), strict=True):
        y = x.float()
        y.mul_(scale)
        y.clamp_(-largest, largest)
        _round_float32(y, format)
        out.copy_(y)
        torch.copysign(out, x, out=out)
    return out_MK


def _round_float32(y: Tensor, format: Format) -> None:
    """Round to the element grid, in place. |y| <= the largest number; the sign of zero is lost."""
    grid = format.value
    bits = torch.bitwise_and(y.view(torch.int32), _int32(FLOAT32_EXPONENT))
    torch.maximum(bits, _int32(grid.min_exponent + 127 << 23), out=bits)
    torch.add(bits, _int32(23 - grid.mantissa_bits << 23 | FLOAT32_HALF), out=bits)
    magic = bits.view(torch.float32)
    torch.add(y, magic, out=y)
    torch.sub(y, magic, out=y)


def nvfp4(x_MK: Tensor, spec: Spec, direction: Direction, noise_MK: Tensor | None) -> tuple[Tensor, float] | None:
    """BF16 numbers of element times block scale, and the amax of the (transformed) tensor."""
    if spec.hadamard and direction == "col":
        x_MK = _hadamard(x_MK)
    tensor_amax = amax(x_MK)
    if tensor_amax is None or tensor_amax > FLOAT32_MAX:
        return None
    s_enc = float32(NV_LARGEST / tensor_amax) if tensor_amax else 1.0
    out_MK = torch.empty_like(x_MK)
    tensors = (x_MK, out_MK) if noise_MK is None else (x_MK, out_MK, noise_MK)
    for x, out, *noise in _pieces(spec.scaling.block(direction), *tensors):
        block_scale = _nv_block_scale(x, s_enc)
        y = x.float()
        y.mul_(torch.mul(block_scale, float32(1 / s_enc)).reciprocal_().clamp_(max=FLOAT32_MAX))
        y.clamp_(-6.0, 6.0)
        if noise:
            _round_stochastically(y, noise[0])
        else:
            _round_float32(y, Format.E2M1)
        torch.mul(y, block_scale, out=y)
        out.copy_(y)
        torch.copysign(out, x, out=out)
    return out_MK, tensor_amax


def _nv_block_scale(x: Tensor, s_enc: float) -> Tensor:
    """float32 numbers of the E4M3 block scales of a 4-D view."""
    amax_bits = _block_amax(torch.bitwise_and(x.view(torch.int16), _int16(0x7FFF)))
    scale = amax_bits.view(torch.bfloat16).float()
    scale.mul_(float32(s_enc * float32(1 / 6))).clamp_(max=Format.E4M3.value.largest)
    _round_float32(scale, Format.E4M3)
    return scale


def _round_stochastically(y: Tensor, random_bits: Tensor) -> None:
    """Magnitudes on the E2M1 grid, in place: floor(|y| + u * spacing). |y| <= 6."""
    noise = random_bits.float()
    y.abs_()
    y.add_(noise.mul_(_e2m1_spacing(y)), alpha=1 / 256)
    spacing = _e2m1_spacing(y)
    y.div_(spacing).floor_().mul_(spacing).clamp_(max=6.0)


def _e2m1_spacing(magnitude: Tensor) -> Tensor:
    """Half the power of two below, at least 0.5."""
    bits = torch.bitwise_and(magnitude.view(torch.int32), _int32(FLOAT32_EXPONENT))
    torch.maximum(bits, _int32(127 << 23), out=bits)
    return torch.sub(bits, _int32(1 << 23), out=bits).view(torch.float32)


HADAMARD_CHUNK = 4 * CHUNK
"""Larger pieces, because half-pieces of 32768 elements or less run on one thread."""


def _hadamard(x_MK: Tensor) -> Tensor:
    if x_MK.numel() <= HADAMARD_CHUNK:
        return hadamard(x_MK)
    out_MK = torch.empty_like(x_MK)
    rows = max(HADAMARD_GROUP, HADAMARD_CHUNK // x_MK.shape[1] // HADAMARD_GROUP * HADAMARD_GROUP)
    for x, out in zip(x_MK.split(rows), out_MK.split(rows), strict=True):
        out.copy_(hadamard(x))
    return out_MK
