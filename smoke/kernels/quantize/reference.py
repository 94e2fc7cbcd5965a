"""The definition: codes and scales of every recipe, in the float32 order of operations of Transformer Engine >= 2.14.

Written to be read next to the formulas; ``fast`` makes the same numbers in fewer passes. Both directions are quantized
from the high-precision source. An amax ignores NaN and keeps inf.

    tensor      s = max / amax (delayed: the given scale), codes = cast(x * s), numbers = code * (1 / s)
    128-blocks  the same in each block; s is rounded down to a power of two, or kept in float32
    mx          E8M0 scale c = ceil(log2(amax / max)), codes = cast(x * 2^-c)
    nv          S = 2688 / amax of the tensor; block scale s8 = E4M3(amax_b * S / 6); codes = E2M1(x / (s8 / S))

Shape letters: M rows, K columns; results keep the logical [M, K] layout in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smoke.kernels.quantize.casts import (
    decode,
    e8m0_up,
    encode,
    encode_stochastic,
    hadamard,
    power_of_two,
)
from smoke.kernels.quantize.spec import Direction, Format, Scaling, Spec

FLOAT32_MAX = torch.finfo(torch.float32).max
NV_LARGEST = 6.0 * 448.0
"""Largest block scale times largest element of NVFP4."""


@dataclass(frozen=True)
class Quantized:
    """Codes and scales of one operand in one direction."""

    codes: Tensor
    """uint8 [M, K]; E2M1 has one code in each byte."""
    scale: Tensor
    """tensor: float32 scalar, the factor 1 / s. 128-blocks: float32 1 / s for each block. mx: uint8 E8M0 code for each
    block. nv: uint8 E4M3 code for each block. Block arrays are [M / block rows, K / block columns], rounded up."""
    spec: Spec
    direction: Direction
    amax: Tensor | None = None
    """nv: float32 scalar amax of the (transformed) tensor."""

    def elements(self) -> Tensor:
        """float32 numbers of the codes, unscaled."""
        return decode(self.codes, self.spec.format)

    def block_scale(self) -> Tensor:
        """float32 [M, K]: the scale of every element's block (nv: without the scale of the tensor)."""
        scale = self.scale
        if self.spec.scaling.family == "mx":
            scale = power_of_two(scale.int() - 127)
        elif self.spec.scaling.family == "nv":
            scale = decode(scale, Format.E4M3)
        return _spread(scale, self.codes.shape, self.spec.scaling.block(self.direction))

    def dequantize(self) -> Tensor:
        """float32 [M, K]: the numbers that the codes stand for."""
        if self.spec.scaling.per_tensor:
            return self.elements() * self.scale
        scale = self.block_scale()
        if self.amax is not None:
            scale = scale * self.amax * (1 / torch.full_like(self.amax, NV_LARGEST))
        return self.elements() * scale


def amax(x: Tensor) -> Tensor:
    """float32 scalar: the largest magnitude; NaN is ignored, inf is not. Zero for an empty tensor."""
    magnitude = _magnitude(x)
    return magnitude.amax() if x.numel() else magnitude.new_zeros(())


def quantize(
    x_MK: Tensor,
    spec: Spec,
    direction: Direction,
    *,
    scale: Tensor | None = None,
    random_bits: Tensor | None = None,
) -> Quantized:
    """Codes and scales of x.

    Args:
        x_MK: BF16 or float32.
        scale: float32 scalar, the scale of delayed scaling; refused by the others.
        random_bits: uint8 [M, K], needed for stochastic rounding; refused by the others.

    Raises:
        ValueError: a size is no multiple of the block, or an argument is missing or superfluous.
    """
    check_arguments(x_MK, spec, direction, scale, random_bits)
    if spec.scaling.family == "nv":
        return _quantize_nv(x_MK, spec, direction, random_bits)
    if spec.scaling.per_tensor:
        s = current_scale(amax(x_MK), spec) if scale is None else scale
        return Quantized(encode(x_MK.float() * s, spec.format), 1 / s, spec, direction)
    block = spec.scaling.block(direction)
    amax_blocks = _block_amax(x_MK, block)
    if spec.scaling.family == "mx":
        codes = e8m0_up(amax_blocks * (1 / torch.full_like(amax_blocks, spec.format.value.largest)))
        multiplier = _spread(power_of_two(127 - codes), x_MK.shape, block)
        return Quantized(encode(x_MK.float() * multiplier, spec.format), codes.to(torch.uint8), spec, direction)
    s = current_scale(amax_blocks, spec, overflow=torch.finfo(x_MK.dtype).max)
    multiplier = _spread(s, x_MK.shape, block)
    return Quantized(encode(x_MK.float() * multiplier, spec.format), 1 / s, spec, direction)


def check_arguments(
    x_MK: Tensor, spec: Spec, direction: Direction, scale: Tensor | None, random_bits: Tensor | None
) -> None:
    """Refuse what ``quantize`` cannot take (raises ValueError)."""
    if x_MK.dim() != 2 or x_MK.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"an operand is a BF16 or float32 matrix, not {x_MK.dtype} {tuple(x_MK.shape)}")
    if (scale is not None) != (spec.scaling is Scaling.TENSOR_DELAYED):
        raise ValueError(f"a scale is for delayed scaling and for nothing else (here: {spec.scaling.name})")
    if (random_bits is not None) != spec.stochastic:
        raise ValueError("random_bits are for stochastic rounding and for nothing else")
    if spec.scaling.per_tensor or spec.scaling.partial_blocks:
        return
    for size, block, name in zip(x_MK.shape, spec.scaling.block(direction), ("rows", "columns"), strict=True):
        if size % block:
            raise ValueError(f"{size} {name}: {spec.scaling.name} in direction {direction} takes multiples of {block}")


def current_scale(amax_: Tensor, spec: Spec, *, overflow: float = FLOAT32_MAX) -> Tensor:
    """max / amax; 1 where amax is zero or not finite; ``overflow`` where the quotient is infinite."""
    largest = torch.full_like(amax_, spec.format.value.largest)
    s = (largest / amax_).clamp(max=overflow)
    s = torch.where((amax_ > 0) & amax_.isfinite(), s, 1.0)
    return (s.view(torch.int32) & 0x7F800000).view(torch.float32) if spec.power_of_two else s


def _quantize_nv(x_MK: Tensor, spec: Spec, direction: Direction, random_bits: Tensor | None) -> Quantized:
    if spec.hadamard and direction == "col":
        x_MK = hadamard(x_MK)
    block = spec.scaling.block(direction)
    amax_tensor = amax(x_MK)
    s_enc = nv_tensor_scale(amax_tensor)
    block_codes = encode((_block_amax(x_MK, block) * (s_enc * _sixth(s_enc))).clamp(max=FLOAT32_MAX), Format.E4M3)
    multiplier = _spread(nv_multiplier(block_codes, s_enc), x_MK.shape, block)
    y = x_MK.float() * multiplier
    codes = encode(y, spec.format) if random_bits is None else encode_stochastic(y, random_bits)
    return Quantized(codes, block_codes, spec, direction, amax_tensor)


def nv_tensor_scale(amax_tensor: Tensor) -> Tensor:
    """S of NVFP4 (float32 scalar): what maps the tensor's amax to 2688; 1 for an amax of zero or inf."""
    s_enc = (torch.full_like(amax_tensor, NV_LARGEST) / amax_tensor).clamp(max=FLOAT32_MAX)
    return torch.where((amax_tensor > 0) & (s_enc > 0), s_enc, 1.0)


def nv_multiplier(block_codes: Tensor, s_enc: Tensor) -> Tensor:
    """What x is multiplied by in each block (float32): 1 / (s8 * (1 / S)), at most the largest float32."""
    return (1 / (decode(block_codes, Format.E4M3) * (1 / s_enc))).clamp(max=FLOAT32_MAX)


def _sixth(like: Tensor) -> Tensor:
    return 1 / torch.full_like(like, 6.0)


def _magnitude(x: Tensor) -> Tensor:
    magnitude = x.float().abs()
    return torch.where(magnitude.isnan(), 0.0, magnitude)


def _block_amax(x_MK: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 [M / rows, K / columns] rounded up; a partial block counts what it has."""
    (m, k), (rows, columns) = x_MK.shape, block
    padded = torch.nn.functional.pad(_magnitude(x_MK), (0, -k % columns, 0, -m % rows))
    if not x_MK.numel():
        return padded.new_zeros(-(-m // rows), -(-k // columns))
    return padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax(dim=(1, 3))


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Each block's number at each of its elements."""
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return spread[: shape[0], : shape[1]]
