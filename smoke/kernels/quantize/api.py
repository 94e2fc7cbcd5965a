"""Quantized operands for exact emulation. ``quantize`` is the definition; ``operand`` makes the same numbers fast."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from smoke.kernels.quantize.delayed import delayed_update
from smoke.kernels.quantize.reference import Quantized, amax, quantize
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
    "both",
    "delayed_update",
    "operand",
    "quantize",
]

_ROOT_ALPHA = math.sqrt((1 / torch.tensor(36.0 * 448.0 * 448.0)).item())


class Operand(NamedTuple):
    """What is multiplied: BF16 values [M, K], and the factor that is applied to the product (None: one)."""

    values: Tensor
    factor: Tensor | None


def operand(
    x_MK: Tensor,
    spec: Spec,
    direction: Direction,
    *,
    scale: Tensor | None = None,
    random_bits: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Operand:
    """Quantize and dequantize x for a product of BF16 operands."""
    if spec.stochastic and random_bits is None:
        random_bits = torch.randint(0, 256, x_MK.shape, dtype=torch.uint8, device=x_MK.device, generator=generator)
    return _of(quantize(x_MK, spec, direction, scale=scale, random_bits=random_bits))


def _of(quantized: Quantized) -> Operand:
    if quantized.spec.scaling.per_tensor:
        return Operand(quantized.elements().bfloat16(), quantized.scale)
    if quantized.amax is None:
        return Operand(quantized.dequantize().bfloat16(), None)
    values = quantized.elements() * quantized.block_scale()
    return Operand(values.bfloat16(), quantized.amax.double() * _ROOT_ALPHA)


def both(
    x_MK: Tensor, spec: Spec, *, scale: Tensor | None = None, generator: torch.Generator | None = None
) -> tuple[Operand, Operand]:
    """The row and the col operand of x."""
    row = operand(x_MK, spec, "row", scale=scale, generator=generator)
    if spec.scaling.per_tensor:
        return row, row
    return row, operand(x_MK, spec, "col", scale=scale, generator=generator)
