"""Known answers: small matrices whose quantized values were worked out by hand, for a check on a live run.

A run hands its own quantizers to ``mismatches`` with the answers of what the recipe says they are. Each answer is a
matrix of zeros (so every one holds rows of zeros) with a few entries, chosen to be wrong under a known mistake: an amax
just above the largest number (a floored scale saturates), ties, numbers of three bits (E5M2 in place of E4M3), numbers
below the smallest normal, blocks of another length, a NaN, an identity in place of the Hadamard transform.

An entry is (lane, position, x, value). Lanes are rows in the row direction and columns in the col direction; the value
is that of ``Operand.values``. Nothing here calls the quantizers that are judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smoke.kernels.quantize.spec import Direction, Format, Spec

Entry = tuple[int, int, float, float]


@dataclass(frozen=True)
class Known:
    """One matrix and its answer."""

    name: str
    entries: tuple[Entry, ...]
    size: int = 64
    """Rows and columns."""
    alpha: float | None = None
    """Factor of a product of two such operands, as float32; None where there is none."""
    scale: float | None = None
    """Given scale of delayed scaling."""
    noise: int | None = None
    """The random bits of every element, for stochastic rounding."""
    directions: tuple[Direction, ...] = ("row", "col")

    def matrix(self, direction: Direction, column: int) -> Tensor:
        """BF16 matrix of x (column 2 of the entries) or of the values (column 3), in the logical layout."""
        lanes = torch.zeros(self.size, self.size)
        for entry in self.entries:
            lanes[entry[0], entry[1]] = entry[column]
        return (lanes if direction == "row" else lanes.mT).contiguous().bfloat16()


def _lane(lane: int, *pairs: tuple[float, float], start: int = 0) -> tuple[Entry, ...]:
    return tuple((lane, start + i, x, value) for i, (x, value) in enumerate(pairs))


_NAN = Known("NaN stays NaN", ((0, 0, math.nan, math.nan), (0, 1, 448.0, 448.0)))

# Blocks of 32 and of 128 with E4M3. amax 510 > 448 gives scale 2: 255 rounds to 256, 450 / 2 = 225 to 224; 1.0625 / 2
# and 17 / 2 are ties; 2^-9 / 2 is half of the smallest number, 3 * 2^-9 / 2 one and a half of it.
_E4M3_ABOVE = _lane(
    0, (510.0, 512.0), (450.0, 448.0), (1.125, 1.125), (1.0625, 1.0), (-17.0, -16.0), (2**-9, 0.0), (3 * 2**-9, 2**-7)
)
_E4M3_AT = _lane(3, (-448.0, -448.0), (1.125, 1.125), (2**-9, 2**-9), (2**-10, 0.0), (3 * 2**-10, 2**-8))
_E4M3_SMALL = _lane(5, (1.0, 1.0), (3 * 2**-18, 2**-16), (0.30078125, 0.3125))
# The same with E5M2: 61440 > 57344 gives scale 2, and 61440 / 2 is a tie.
_E5M2_ABOVE = _lane(0, (61440.0, 65536.0), (40960.0, 40960.0), (1.125, 1.0), (-1.375, -1.5))
_E5M2_AT = _lane(3, (57344.0, 57344.0), (1.125, 1.0), (1.375, 1.5), (2**-17, 0.0), (3 * 2**-17, 2**-15))

_SHARED = {
    # entries 32 positions on: a block of their own with 32, the block of the first ones with 128
    ("mx", Format.E4M3): (
        Known("just above the largest number", _E4M3_ABOVE + _lane(0, (1.0, 1.0), (3 * 2**-18, 2**-16), start=32)),
        Known("at the largest number, and far below it", _E4M3_AT + _E4M3_SMALL),
        _NAN,
    ),
    ("mx", Format.E5M2): (Known("above and at the largest number", _E5M2_ABOVE + _E5M2_AT),),
    ("block", Format.E4M3): (
        Known(
            "just above the largest number",
            _E4M3_ABOVE
            + _lane(0, (1.0, 1.0), (3 * 2**-18, 0.0), start=32)
            + _lane(0, (1.0, 1.0), (3 * 2**-18, 2**-16), start=128),
            size=160,
        ),
        Known("at the largest number, and far below it", _E4M3_AT + _E4M3_SMALL, size=128),
        _NAN,
    ),
    ("block", Format.E5M2): (Known("above and at the largest number", _E5M2_ABOVE + _E5M2_AT, size=128),),
}

_SQUARE = (
    # every lane shares scale 2 with the first, so the numbers of the other lanes round coarser; position 128 does not
    Known(
        "one scale for 128 x 128",
        _E4M3_ABOVE
        + _lane(3, (-448.0, -448.0), (1.125, 1.125), (2**-9, 0.0), (2**-10, 0.0), (3 * 2**-10, 2**-8))
        + _lane(5, (1.0, 1.0), (3 * 2**-18, 0.0), (0.30078125, 0.3125))
        + _lane(3, (1.0, 1.0), (3 * 2**-18, 2**-16), start=128),
        size=160,
    ),
    _NAN,
)

# Tensor scaling; values are the numbers of the codes. amax 3.5 gives scale 128 in E4M3 and 2^14 in E5M2; amax 3 a scale
# that is no power of two: 149.33333 and 19114.666, and alpha is the square of its rounded reciprocal.
_CURRENT = {
    Format.E4M3: (
        Known("scale 128", _lane(0, (3.5, 448.0), (1.0625, 128.0), (1.125, 144.0), (-(2.0**-17), 0.0)), alpha=2**-14),
        Known("scale 149.33", _lane(2, (-3.0, -448.0), (1.0, 144.0)), alpha=float.fromhex("0x1.7829ccp-15")),
        Known("all zero", (), alpha=1.0),
    ),
    Format.E5M2: (
        Known("scale 16384", _lane(0, (3.5, 57344.0), (1.125, 16384.0), (1.375, 24576.0)), alpha=2**-28),
        Known("scale 19114.67", _lane(2, (-3.0, -57344.0), (1.0, 20480.0)), alpha=float.fromhex("0x1.7829ccp-29")),
        Known("all zero", (), alpha=1.0),
    ),
}
_DELAYED = {
    Format.E4M3: (
        Known(
            "scale 2",
            _lane(0, (300.0, 448.0), (1.0625, 2.0), (1.125, 2.25), (-250.0, -448.0), (math.nan, math.nan)),
            scale=2.0,
            alpha=0.25,
        ),
    ),
    Format.E5M2: (
        Known(
            "scale 2",
            _lane(0, (30000.0, 57344.0), (1.125, 2.0), (1.375, 3.0), (300.0, 640.0), (math.nan, math.nan)),
            scale=2.0,
            alpha=0.25,
        ),
    ),
}

# NVFP4; values are element times block scale. amax 6 gives S = 448 and, in its block, scale 448 and multiplier 1.
# A block with amax 0.01 gets scale 0.75 (0.747 rounded) and one with 2^-20 gets zero. alpha = fl(36 / 2688^2).
_NV_ALPHA = float.fromhex("0x1.4e5e0ap-18")
_NV_TIES = _lane(
    0,
    *((6.0, 2688.0), (5.0, 1792.0), (3.5, 1792.0), (2.5, 896.0), (1.75, 896.0)),
    *((1.25, 448.0), (0.75, 448.0), (0.25, 0.0), (-5.0, -1792.0)),
)
_NV_FAR = _lane(0, (0.010009765625, 4.5), (0.0050048828125, 2.25), start=16) + _lane(0, (2.0**-20, 0.0), start=32)
_NV_LANES = _lane(1, (0.010009765625, 4.5))
_NV_SHARED = _lane(1, (0.010009765625, 0.0))
_NV_DOWN = _lane(0, (6.0, 2688.0), (5.0, 1792.0), (3.5, 1344.0), (2.75, 896.0), (-1.75, -672.0), (0.25, 0.0))
_NV_UP = _lane(0, (6.0, 2688.0), (5.0, 2688.0), (3.5, 1792.0), (2.25, 1344.0), (-1.75, -896.0), (0.25, 224.0))
_NV_GRID = _lane(1, (6.0, 2688.0), (4.0, 1792.0), (3.0, 1344.0), (1.0, 448.0), (0.5, 224.0), (0.0, 0.0))
# A lone 16 becomes +-4 in its 16-group: signs of a row of H16 times the random sign of that row (row 3: minus).
_HADAMARD = (
    *((0, i, 16.0 * (i == 0), 2688.0) for i in range(16)),
    *((1, i, 16.0 * (i == 3), -2688.0 if i % 4 in (0, 3) else 2688.0) for i in range(16)),
)
_HADAMARD_ALPHA = float.fromhex("0x1.293726p-19")


def known_answers(spec: Spec) -> tuple[Known, ...]:
    """The answers for an operand that is quantized as ``spec`` says (power-of-two scales for 128-blocks)."""
    family = spec.scaling.family
    if family == "nv":
        return _nv(spec)
    if family == "delayed":
        return _DELAYED[spec.format]
    if family == "current":
        return _CURRENT[spec.format]
    square = spec.scaling.block("row")[0] > 1
    return _SQUARE if square else _SHARED[family, spec.format]


def _nv(spec: Spec) -> tuple[Known, ...]:
    if spec.scaling.symmetric:
        return (Known("ties, and one scale for 16 x 16", _NV_TIES + _NV_FAR + _NV_SHARED, alpha=_NV_ALPHA),)
    directions: tuple[Direction, ...] = ("row",) if spec.hadamard else ("row", "col")
    cases: tuple[tuple[str, tuple[Entry, ...], int | None], ...]
    cases = (("ties and small blocks", _NV_TIES + _NV_FAR + _NV_LANES, None),)
    if spec.stochastic:
        cases = (("random bits 0", _NV_DOWN + _NV_GRID, 0), ("random bits 255", _NV_UP + _NV_GRID, 255))
    found = tuple(Known(n, e, alpha=_NV_ALPHA, noise=noise, directions=directions) for n, e, noise in cases)
    if spec.hadamard:
        noise = 128 if spec.stochastic else None
        found += (Known("Hadamard", _HADAMARD, alpha=_HADAMARD_ALPHA, noise=noise, directions=("col",)),)
    return found


def mismatches(known: Known, quantizer: Callable[..., tuple[Tensor, Tensor | None]], device=None) -> list[str]:
    """What a quantizer gets wrong, one line for each wrong element or factor.

    Args:
        quantizer: called as ``quantizer(x_MK, direction, scale=, random_bits=)``; returns values and factor, as
            ``operand`` does for its own spec.
    """
    found = []
    for direction in known.directions:
        x_MK = known.matrix(direction, 2).to(device)
        scale = None if known.scale is None else torch.tensor(known.scale, device=device)
        noise = None
        if known.noise is not None:
            noise = torch.full(x_MK.shape, known.noise, dtype=torch.uint8, device=device)
        values, factor = quantizer(x_MK, direction, scale=scale, random_bits=noise)
        alpha = None if factor is None else (factor * factor).float().item()
        if alpha != known.alpha:
            found.append(f"{known.name}, {direction}: factor of a product {alpha}, not {known.alpha}")
        found += _wrong_elements(known, direction, values.cpu().float())
    return found


def _wrong_elements(known: Known, direction: Direction, values_MK: Tensor) -> list[str]:
    wanted_MK = known.matrix(direction, 3).float()
    wrong_MK = (values_MK != wanted_MK) & ~(values_MK.isnan() & wanted_MK.isnan())
    return [
        f"{known.name}, {direction} [{i}, {j}]: {values_MK[i, j].item()}, not {wanted_MK[i, j].item()}"
        for i, j in wrong_MK.nonzero().tolist()
    ]
