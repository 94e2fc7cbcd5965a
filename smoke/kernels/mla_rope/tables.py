"""What every implementation of a rotation looks up, as one argument.

Shape letters: P rows of the tables, R rotated columns, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tables(NamedTuple):
    """cos and sin, float [P, R/2], and the row of each token, int64 [T]."""

    cos_PR: Tensor
    sin_PR: Tensor
    positions_T: Tensor
