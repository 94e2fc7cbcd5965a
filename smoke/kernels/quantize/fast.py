"""The same numbers as the definition, for BF16 matrices on a CPU, in few passes over cache-sized pieces.

Three ideas carry it:

* Magnitudes of BF16 numbers order like their bits, so an amax is an integer maximum, and scales that are powers of two
  come out of it by integer arithmetic.
* Adding C = 1.5 * 2^E to a number and subtracting it again rounds to nearest even at the last place of C. With the E of
  each element's own exponent, but not below the format's smallest exponent, that is the cast to the element grid.
* Where scales are powers of two and nothing leaves the exponent range, scaling is not needed at all: x itself is
  rounded at the place that the scale implies, in BF16 arithmetic (which torch rounds once, from float32).

Whatever does not fit (NaN, inf, blocks near the ends of the exponent range) returns None, and the caller takes the
definition. Scratch is allocated anew in each call, small enough that the allocator reuses it without page faults.

Shape letters: M rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from smoke.kernels.quantize.casts import decode, encode, hadamard
from smoke.kernels.quantize.reference import FLOAT32_MAX, nv_multiplier, nv_tensor_scale
from smoke.kernels.quantize.spec import Direction, Format, Spec

CHUNK = 1 << 17
"""Elements in a piece: two int16 buffers of it fit in the second-level caches of two cores (tuned on a Zen 3)."""
BF16_MAGNITUDE, BF16_EXPONENT, BF16_INF = 0x7FFF, 0x7F80, 0x7F80
FLOAT32_EXPONENT, FLOAT32_HALF = 0x7F800000, 1 << 22


def takes(x_MK: Tensor) -> bool:
    """Whether this file can quantize x at all."""
    return x_MK.dtype is torch.bfloat16 and x_MK.device.type == "cpu" and x_MK.numel() > 0


def amax(x: Tensor) -> Tensor | None:
    """float32 scalar: the largest magnitude (inf counts); None where there is a NaN."""
    bits = x.view(torch.int16).view(-1)
    scratch = torch.empty(min(CHUNK, bits.numel()), dtype=torch.int16)
    largest = 0
    for piece in bits.split(CHUNK):
        magnitude = torch.bitwise_and(piece, BF16_MAGNITUDE, out=scratch[: piece.numel()])
        largest = max(largest, int(magnitude.max()))
    if largest > BF16_INF:
        return None
    return torch.tensor(largest << 16, dtype=torch.int32).view(torch.float32)


def _pieces(x_MK: Tensor, out_MK: Tensor, block: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Matching 4-D views [row blocks, rows, column blocks, columns] of input and output; partial blocks come last."""
    (m, k), (rows, columns) = x_MK.shape, block
    whole_m, whole_k = m - m % rows, k - k % columns
    for left, right, width in ((0, whole_k, columns), (whole_k, k, k - whole_k)):
        if left == right:
            continue
        step = max(rows, CHUNK // (right - left) // rows * rows)
        starts = [(top, min(top + step, whole_m), rows) for top in range(0, whole_m, step)]
        for top, bottom, height in (*starts, (whole_m, m, m - whole_m)):
            if top < bottom:
                yield tuple(
                    t[top:bottom, left:right].unflatten(0, (-1, height)).unflatten(2, (-1, width))
                    for t in (x_MK, out_MK)
                )


def _block_amax(magnitude: Tensor) -> Tensor:
    """Largest of each block of a 4-D view, with the block dimensions kept as ones."""
    if magnitude.shape[1] > 1:
        magnitude = magnitude.amax(1, keepdim=True)
    return magnitude.amax(3, keepdim=True) if magnitude.shape[3] > 1 else magnitude


def power_of_two_blocks(x_MK: Tensor, format: Format, block: tuple[int, int]) -> Tensor | None:
    """Dequantized BF16 values of mx and 128-blocks: each scale is the power of two next above amax / max."""
    out_MK = torch.empty(x_MK.shape, dtype=x_MK.dtype)
    for x, out in _pieces(x_MK, out_MK, block):
        if not _round_blocks(x, out, format):
            return None
    return out_MK


def _round_blocks(x: Tensor, out: Tensor, format: Format) -> bool:
    """Round one piece into ``out``; False where a block lies outside the exponents that BF16 arithmetic can do."""
    grid = format.value
    shift = 7 - grid.mantissa_bits
    lowest = 1 + grid.largest_exponent - grid.min_exponent
    bits = x.view(torch.int16)
    scratch = torch.bitwise_and(bits, BF16_MAGNITUDE)
    amax_bits = _block_amax(scratch)
    # exponent of amax, one more where its fraction is above that of 448 and 57344 (1.75 = 0x60 / 0x80 + 1)
    exponent = amax_bits + 0x1F
    exponent >>= 7
    exponent.masked_fill_(amax_bits == 0, lowest)
    low, high = exponent.aminmax()
    if int(low) < lowest or int(high) > 254 - shift:
        return False
    exponent -= lowest - 1
    exponent <<= 7
    torch.bitwise_and(bits, BF16_EXPONENT, out=scratch)
    torch.maximum(scratch, exponent, out=scratch)
    scratch += shift << 7 | 0x40
    magic = scratch.view(torch.bfloat16)
    torch.add(x, magic, out=out)
    out -= magic
    torch.copysign(out, x, out=out)
    return True


def tensor_scaled(x_MK: Tensor, format: Format, scale: Tensor) -> Tensor:
    """BF16 numbers of the codes of x * scale (float32 scalar); NaN stays NaN."""
    out_MK = torch.empty(x_MK.shape, dtype=x_MK.dtype)
    largest = format.value.largest
    for x, out in zip(x_MK.view(-1).split(CHUNK), out_MK.view(-1).split(CHUNK), strict=True):
        y = x.float()
        y *= scale
        y.clamp_(-largest, largest)
        _round_float32(y, format)
        out.copy_(y)
        torch.copysign(out, x, out=out)
    return out_MK


def _round_float32(y: Tensor, format: Format) -> None:
    """Round to the element grid, in place. |y| <= the largest number; the sign of zero is lost."""
    grid = format.value
    magic = y.view(torch.int32) & FLOAT32_EXPONENT
    magic.clamp_(min=grid.min_exponent + 127 << 23)
    magic += 23 - grid.mantissa_bits << 23 | FLOAT32_HALF
    y += magic.view(torch.float32)
    y -= magic.view(torch.float32)


def nvfp4(x_MK: Tensor, spec: Spec, direction: Direction, random_bits: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """BF16 numbers of element times block scale, and the float32 amax of the (transformed) tensor."""
    if spec.hadamard and direction == "col":
        x_MK = _hadamard(x_MK)
    tensor_amax = amax(x_MK)
    if tensor_amax is None or tensor_amax.isinf():
        return None
    s_enc = nv_tensor_scale(tensor_amax)
    block_factor = s_enc * (1 / torch.full_like(s_enc, 6.0))
    out_MK = torch.empty(x_MK.shape, dtype=x_MK.dtype)
    block = spec.scaling.block(direction)
    noise = None if random_bits is None else random_bits.contiguous()
    noises = [None] if noise is None else [n for n, _ in _pieces(noise, out_MK, block)]
    for index, (x, out) in enumerate(_pieces(x_MK, out_MK, block)):
        amax_bits = _block_amax(x.view(torch.int16) & BF16_MAGNITUDE).int()
        amax_bits <<= 16
        block_codes = encode((amax_bits.view(torch.float32) * block_factor).clamp_(max=FLOAT32_MAX), Format.E4M3)
        y = x.float()
        y *= nv_multiplier(block_codes, s_enc)
        y.clamp_(-6.0, 6.0)
        piece_noise = None if noise is None else noises[index]
        if piece_noise is None:
            _round_float32(y, Format.E2M1)
        else:
            y = _round_stochastically(y, piece_noise)
        y *= decode(block_codes, Format.E4M3)
        out.copy_(y)
        torch.copysign(out, x, out=out)
    return out_MK, tensor_amax


def _round_stochastically(y: Tensor, random_bits: Tensor) -> Tensor:
    """Magnitudes on the E2M1 grid: floor(|y| + u * spacing), where the spacing is half the power of two below."""
    y = y.abs_()
    noise = random_bits.float()
    noise *= _e2m1_spacing(y).mul_(1 / 256)
    y += noise
    spacing = _e2m1_spacing(y)
    y /= spacing
    y.floor_()
    y *= spacing
    return y.clamp_(max=6.0)


def _e2m1_spacing(magnitude: Tensor) -> Tensor:
    exponent = magnitude.view(torch.int32) & FLOAT32_EXPONENT
    exponent.clamp_(min=127 << 23)
    exponent -= 1 << 23
    return exponent.view(torch.float32)


def _hadamard(x_MK: Tensor) -> Tensor:
    out_MK = torch.empty(x_MK.shape, dtype=x_MK.dtype)
    rows = max(16, CHUNK // 4 // x_MK.shape[1] // 16 * 16)
    for x, out in zip(x_MK.split(rows), out_MK.split(rows), strict=True):
        out.copy_(hadamard(x))
    return out_MK
