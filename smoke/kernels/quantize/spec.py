"""What a quantized operand is, as data: element format, scaling, extras. Imports no torch, so plans can read it.

An element format is a grid of numbers: ``mantissa_bits`` after the leading one down to ``min_exponent``, evenly spaced
below, saturating at ``largest``. A scaling says which elements share a scale, and in which number system the scale
lives. Sources: OCP MX 1.0 for the formats, Transformer Engine 2.20 for what is done with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

Direction = Literal["row", "col"]
"""row: scale blocks run along the last dimension; col: along the first. Results keep the logical [M, K] layout."""


@dataclass(frozen=True)
class Grid:
    """Numbers of an element format."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def largest_exponent(self) -> int:
        """floor(log2(largest))."""
        return int(self.largest).bit_length() - 1


class Format(Enum):
    """Element formats, with their grids."""

    E4M3 = Grid(exponent_bits=4, mantissa_bits=3, bias=7, largest=448.0)
    E5M2 = Grid(exponent_bits=5, mantissa_bits=2, bias=15, largest=57344.0)
    E2M1 = Grid(exponent_bits=2, mantissa_bits=1, bias=1, largest=6.0)


FORMAT_MAX: dict[Format, float] = {format: format.value.largest for format in Format}
"""Largest finite number of each element format."""


class Scaling(Enum):
    """Which elements share a scale: (rows, columns) of a row-direction block; 0 means the whole tensor."""

    TENSOR_DELAYED = ("delayed", 0, 0)
    TENSOR_CURRENT = ("current", 0, 0)
    BLOCK_1D_128 = ("block", 1, 128)
    BLOCK_2D_128 = ("block", 128, 128)
    MX_32 = ("mx", 1, 32)
    NV_16 = ("nv", 1, 16)
    NV_16x16 = ("nv", 16, 16)

    @property
    def family(self) -> str:
        """delayed, current, block, mx or nv: what the scale is made of."""
        return self.value[0]

    @property
    def per_tensor(self) -> bool:
        """One scale for the whole tensor, and one code array for both directions."""
        return self.value[2] == 0

    @property
    def symmetric(self) -> bool:
        """Whether both directions have the same numbers: one scale for the tensor, or square blocks."""
        return self.value[1] == self.value[2]

    @property
    def partial_blocks(self) -> bool:
        """Whether the last block of a dimension may be incomplete."""
        return self.family == "block"

    def separates(self, rows: Sequence[int], direction: Direction) -> bool:
        """Whether consecutive groups of rows can be quantized in one go: no scale belongs to two of them."""
        height = self.block(direction)[0]
        return self.family in ("block", "mx") and all(count % height == 0 for count in rows)

    def block(self, direction: Direction) -> tuple[int, int]:
        """(rows, columns) of one block in the logical [M, K] layout."""
        _, rows, columns = self.value
        return (rows, columns) if direction == "row" else (columns, rows)


@dataclass(frozen=True)
class Spec:
    """How one operand of a GEMM is quantized."""

    format: Format
    scaling: Scaling
    hadamard: bool = False
    """NVFP4: transform 16-groups along the first dimension before the col direction is quantized."""
    stochastic: bool = False
    """NVFP4: round stochastically, with 8 random bits an element."""
    power_of_two: bool = False
    """Tensor and 128-block scales: round the scale down to a power of two."""
