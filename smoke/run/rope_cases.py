"""Cases of the rotary kernels: sizes, tables, surrounded tensors, and the one measure of error.

Shape letters: T tokens, R rotated columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smoke.checks.rope import POSITIONS
from smoke.config import ModelConfig, RopeScaling
from smoke.kernels.mla_rope.tables import Tables
from smoke.model.rope import rope_table
from smoke.record import RopeRow
from smoke.run.rope_oracle import turns

UNEQUAL = RopeScaling(mscale=0.707, mscale_all_dim=1.3)
"""With equal mscale and mscale_all_dim the two corrections of YaRN hide each other."""
GUARD = -77.0
"""What lies around an output; a stray element is seen because it is not this."""


@dataclass(frozen=True)
class Rotation:
    """What a kernel looks up for some positions, and the oracle's numbers for it (complex128 [T, R/2])."""

    positions: tuple[int, ...]
    tables: Tables
    turned: Tensor
    rotated: int

    @staticmethod
    def of(config: ModelConfig, device: str, positions: tuple[int, ...] = POSITIONS) -> Rotation:
        length = positions[-1] + 1
        config = replace(config, max_position_embeddings=max(config.max_position_embeddings, length))
        cos_PR, sin_PR = rope_table(config, device, length=length)
        looked_up = Tables(cos_PR, sin_PR, torch.tensor(positions, device=device))
        return Rotation(positions, looked_up, turns(config, positions).to(device), config.qk_rope_head_dim)


@dataclass(frozen=True)
class Case:
    """Sizes, type and place of one case."""

    impl: str
    heads: int
    copied: int
    rotation: Rotation
    dtype: torch.dtype
    device: str

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.impl}, {self.heads} heads, {self.copied} + {self.rotation.rotated} columns, {dtype}"


class Surrounded:
    """A tensor with gaps between its heads and columns, inside a buffer that reaches beyond it on all sides."""

    def __init__(self, shape: Sequence[int], case: Case, *, outside: float, seed: int | None = None):
        around = (shape[0] + 2, *(2 * size + 3 for size in shape[1:]))
        self.buffer = torch.full(around, outside, dtype=case.dtype, device=case.device)
        self.tensor = self.buffer[(slice(1, -1), *(slice(2, 2 + 2 * size, 2) for size in shape[1:]))]
        if seed is None:
            self.tensor.fill_(math.nan)
        else:
            drawn = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
            self.tensor.copy_(drawn.to(case.dtype))

    def unwritten(self) -> int:
        return int(self.tensor.isnan().sum())

    def written_outside(self) -> int:
        """Elements outside of the tensor that changed (call last: it overwrites the tensor)."""
        self.tensor.fill_(GUARD)
        return int((self.buffer != GUARD).sum())


def odd_cases(
    impl: str,
    device: str,
    base: ModelConfig,
    sizes: Iterable[tuple[int, int, int]],
    positions: tuple[int, ...] = POSITIONS,
) -> list[Case]:
    """Sizes that are no powers of two, with unequal corrections; narrow ones in float32, the others in BF16.

    Triton's interpreter rounds to BF16 wrongly, so there all are in float32.
    """
    base, sizes = replace(base, rope_scaling=UNEQUAL), list(sizes)
    wide = torch.float32 if impl == "triton" and device == "cpu" else torch.bfloat16
    rotations = {
        rotated: Rotation.of(replace(base, qk_rope_head_dim=rotated), device, positions)
        for rotated in sorted({rotated for _, _, rotated in sizes})
    }
    return [
        Case(impl, heads, copied, rotations[rotated], wide if copied else torch.float32, device)
        for heads, copied, rotated in sizes
    ]


def error_row(kind: str, case: Case, name: str, tensor: str, got: Tensor, want: Tensor) -> RopeRow:
    """The position with the largest error; a NaN is the largest."""
    if not got.numel():
        return RopeRow(kind=kind, case=name, tensor=tensor, position=None, value=0.0)
    error_T, size_T = ((x.double().abs().flatten(1).amax(1)) for x in (got.double() - want, want))
    units_T = (error_T / size_T / torch.finfo(got.dtype).eps).nan_to_num(nan=math.inf, posinf=math.inf)
    worst = int(units_T.argmax())
    position = case.rotation.positions[worst]
    return RopeRow(kind=kind, case=name, tensor=tensor, position=position, value=float(units_T[worst]))
