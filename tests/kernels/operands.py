"""Both operands of a matrix, as a leaf multiplies them."""

from __future__ import annotations

import torch

from smoke.kernels.quantize.api import Operand, Spec, operand


def both(
    x_MK: torch.Tensor, spec: Spec, *, scale: torch.Tensor | None = None, generator: torch.Generator | None = None
) -> tuple[Operand, Operand]:
    """The row and the col operand; one and the same where the recipe has one code array or square blocks."""
    row = operand(x_MK, spec, "row", scale=scale, generator=generator)
    return row, row if spec.scaling.symmetric else operand(x_MK, spec, "col", scale=scale, generator=generator)
