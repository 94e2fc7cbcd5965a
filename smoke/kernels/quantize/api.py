"""Quantized operands for exact emulation: what a GEMM of the recipe multiplies, as BF16 values and one factor.

``quantize`` is the definition (codes and scales, ``reference``). ``operand`` makes what an emulated product needs from
it, on a CPU without passing through codes (``fast``), on other devices with the definition's own operations:

    scaling      values                                             factor
    tensor       the numbers of the codes                           1 / scale (float32)
    128-blocks   number of the code times block scale               None
    mx           number of the code times block scale               None
    nv           E2M1 number times E4M3 block scale                 amax / 2688 (float64, see below)

The product of two operands is ``product(a.values, b.values, factor=a.factor * b.factor)``: BF16 products are exact in
float32, and the factors meet the float32 sum before its one rounding. The two NVFP4 factors are float64 halves of
Transformer Engine's alpha: rounded to float32, their product is fl(fl(amax_a * amax_b) * fl(1 / 2688^2)) to the bit.

Block values of BF16 inputs are exact: no number on the element grid of a block lies below the last place of BF16 unless
the input does, and where the block's amax is near the largest BF16 number its multiple of 2^120 overflows to inf in
float32 as well. float32 inputs can need digits below 2^-133; those are rounded to BF16.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from smoke.kernels.quantize import fast, reference
from smoke.kernels.quantize.delayed import delayed_update
from smoke.kernels.quantize.reference import Quantized, quantize
from smoke.kernels.quantize.spec import FORMAT_MAX, Direction, Format, Scaling, Spec

__all__ = [
    "FORMAT_MAX",
    "Direction",
    "Format",
    "Operand",
    "Quantized",
    "Scaling",
    "Spec",
    "amax",
    "delayed_update",
    "operand",
    "quantize",
    "random_bits_like",
]

_ROOT_ALPHA = math.sqrt(fast.float32(1 / reference.NV_LARGEST**2))


class Operand(NamedTuple):
    """What is multiplied: BF16 values [M, K], and the factor that the product is multiplied by (None: one)."""

    values: Tensor
    factor: Tensor | None


def amax(x: Tensor) -> Tensor:
    """float32 scalar: the largest magnitude of x. NaN is ignored, inf is not; zero for an empty tensor."""
    x = x.detach()
    found = fast.amax(x.contiguous()) if fast.takes(x) else None
    return reference.amax(x) if found is None else torch.tensor(found, device="cpu")


def operand(
    x_MK: Tensor,
    spec: Spec,
    direction: Direction,
    *,
    scale: Tensor | None = None,
    random_bits: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Operand:
    """One operand of an emulated product, in the logical layout of x. No gradient flows through it.

    Args:
        x_MK: BF16 (fast on a CPU) or float32 matrix, of any strides.
        scale: float32 scalar, for delayed scaling and nothing else.
        random_bits: uint8 [M, K] for stochastic rounding; drawn from ``generator`` (or the device's default one)
            where they are not given.

    Raises:
        ValueError: a size is no multiple of the block, an argument is missing or superfluous, or the spec has float32
            scales for 128-blocks, which no single product of BF16 operands can apply.
    """
    if spec.scaling.family == "block" and not spec.power_of_two:
        raise ValueError(f"{spec.scaling.name} with float32 scales has no BF16 operand; use power_of_two")
    if spec.stochastic and random_bits is None:
        random_bits = random_bits_like(x_MK, generator)
    x_MK = x_MK.detach()
    found = None
    if fast.takes(x_MK):
        reference.check_arguments(x_MK, spec, direction, scale, random_bits)
        found = _fast(x_MK.contiguous(), spec, direction, scale, random_bits)
    return found or _from_definition(quantize(x_MK, spec, direction, scale=scale, random_bits=random_bits))


def random_bits_like(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """uint8 random numbers in the shape of x, eight to a draw."""
    words = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[: x.numel()].view(x.shape)


def _fast(
    x_MK: Tensor, spec: Spec, direction: Direction, scale: Tensor | None, random_bits: Tensor | None
) -> Operand | None:
    if spec.scaling.family == "nv":
        found = fast.nvfp4(x_MK, spec, direction, random_bits)
        return found and Operand(found[0], _half_alpha(torch.tensor(found[1], device="cpu")))
    if not spec.scaling.per_tensor:
        values = fast.power_of_two_blocks(x_MK, spec.format, spec.scaling.block(direction))
        return None if values is None else Operand(values, None)
    if scale is not None:
        return Operand(fast.tensor_scaled(x_MK, spec.format, scale), 1 / scale)
    largest = fast.amax(x_MK)
    if largest is None:
        return None
    s = fast.current_scale(largest, spec)
    return Operand(fast.tensor_scaled(x_MK, spec.format, s), torch.tensor(fast.float32(1 / s), device="cpu"))


def _from_definition(quantized: Quantized) -> Operand:
    if quantized.spec.scaling.per_tensor:
        return Operand(quantized.elements().bfloat16(), quantized.scale)
    if quantized.amax is None:
        return Operand(quantized.dequantize().bfloat16(), None)
    return Operand((quantized.elements() * quantized.block_scale()).bfloat16(), _half_alpha(quantized.amax))


def _half_alpha(amax_: Tensor) -> Tensor:
    return amax_.double() * _ROOT_ALPHA
