"""Faults of Triton kernels, put into what launches them; on a CPU they run in Triton's interpreter.

A mask, a block and an autotuner are each wrong in the way a kernel's text would be, without a second copy of the text:
a mask that lets every head of a block through is the mask of a tensor with that many heads more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from smoke.config import CheckConfig
from smoke.faults.fault import Fault, replaced

Meta = dict[str, Any]
"""Block sizes and other constants of a launch."""


def head_mask_inside_the_block() -> AbstractContextManager[None]:
    """Index inside the block < heads: true for every head of a block, wherever there is more than one block."""

    def masked(heads: int, meta: Meta) -> tuple[int, Meta]:
        block = meta["BLOCK_N"]
        return (heads if heads <= block else -(-heads // block) * block), meta

    return _launched(masked)


def pairs_rounded_down() -> AbstractContextManager[None]:
    """The block of rotated pairs is the power of two below their number, so the last pairs are never written."""
    return _launched(lambda heads, meta: (heads, {**meta, "BLOCK_H": 1 << (meta["HALF"].bit_length() - 1)}))


@contextlib.contextmanager
def autotuned_in_place() -> Iterator[None]:
    """The first call of each shape is timed on live data by a kernel that works in place: it rotates twice."""
    from smoke.kernels.mla_rope import triton as kernels

    rotate, seen = kernels.rotate_into, set()

    def tuned(
        copy: Any, pe: Any, copied: Any, out: Any, tables: Any, inverse: bool = False, *rest: Any, **blocks: Any
    ) -> None:
        rotate(copy, pe, copied, out, tables, inverse, *rest, **blocks)
        if (key := (out.shape, inverse)) not in seen:
            seen.add(key)
            rotate(copy, out.clone(), copied, out, tables, inverse, *rest, **blocks)

    with replaced(kernels, "rotate_into", tuned):
        yield


def _launched(changed: Callable[[int, Meta], tuple[int, Meta]]) -> AbstractContextManager[None]:
    """Every kernel is launched with the number of heads and the blocks that ``changed`` makes of the right ones."""
    from smoke.kernels.mla_rope import triton as kernels

    launch = kernels._launch

    def launched(kernel: Any, grid: Any, tables: Any, heads: int, x: Any, args: Any, **meta: Any) -> None:
        heads, meta = changed(heads, meta)
        launch(kernel, grid, tables, heads, x, args, **meta)

    return replaced(kernels, "_launch", launched)


INTERPRETED = {"check": CheckConfig(gradient_parity_every=2, triton_interpreter=True)}

FAULTS = (
    Fault(
        name="head-mask-inside-the-block",
        row=5,
        summary="a kernel masks heads by their index inside the block: it writes past the last head",
        red=("rope_contract",),
        where="5 heads",
        changes=INTERPRETED,
        inject=head_mask_inside_the_block,
        needs_triton=True,
    ),
    Fault(
        name="pairs-rounded-down",
        row=27,
        summary="a kernel writes the rotated pairs of a power of two only, and leaves the rest as memory was",
        red=("rope_contract",),
        where="unwritten",
        changes=INTERPRETED,
        inject=pairs_rounded_down,
        needs_triton=True,
    ),
    Fault(
        name="autotuned-in-place",
        row=28,
        summary="autotuning runs an in-place kernel on live data: the first call of each shape is wrong",
        red=("rope_contract",),
        may_follow=("determinism", "recompute_parity", "neutrality"),
        where="repeat",
        inject=autotuned_in_place,
        needs_cuda=True,
        needs_triton=True,
    ),
)
