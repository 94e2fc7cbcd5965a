"""Who works on what: where each token's sequence starts, and the shares of the latent's gradient.

The gradient of a block of keys sums over all later queries of its sequence. One program for each block would leave
most of a GPU idle and the first block with all the work, so the queries are cut into chunks; each (key block, chunk) is
a share with a float32 partial sum of its own, and the shares of a block are added in order: no atomics, one order, the
same bits in every run.

Shape letters: T tokens, W shares, B key blocks.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_TOKENS = 128
"""Query tokens of a share (tuned on an H200 at 4,096 tokens and 128 heads: 32 to 128 are equal, 256 is 10 % slower)."""
CHUNK_ROWS = 4096
"""Least rows (tokens times heads) of a share, so that few heads make no tiny shares."""


class Schedule(NamedTuple):
    """int32 tensors on the device."""

    starts_T: Tensor
    """First token of each token's sequence."""
    shares_W4: Tensor
    """Key block, first row, last row (exclusive), and the share's own number; longest first."""
    first_B1: Tensor
    """First share of each key block, and one more at the end; shares of a block are numbered in a row."""


@functools.lru_cache(maxsize=64)
def schedule(lengths: tuple[int, ...], heads: int, block: int, device: torch.device) -> Schedule:
    """The plan for sequences of these lengths. ``block`` keys belong together. Kept for the next call."""
    starts: list[int] = []
    ends: list[int] = []
    for length in lengths:
        start = len(starts)
        starts += [start] * length
        ends += [start + length] * length
    chunk = max(CHUNK_TOKENS, -(-CHUNK_ROWS // heads)) * heads
    shares: list[tuple[int, int, int, int]] = []
    first = [0]
    for number, key in enumerate(range(0, len(starts), block)):
        last = ends[min(key + block, len(starts)) - 1] * heads
        for row in range(key * heads, last, chunk):
            shares.append((number, row, min(row + chunk, last), len(shares)))
        first.append(len(shares))
    shares.sort(key=lambda share: share[1] - share[2])
    tensor = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    return Schedule(tensor(starts), tensor(shares), tensor(first))
