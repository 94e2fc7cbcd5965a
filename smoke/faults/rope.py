"""Faults of the rotary embedding: its tables, YaRN's corrections, and the pairing of columns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from smoke.faults.fault import Fault, replaced


@contextlib.contextmanager
def narrow_table() -> Iterator[None]:
    """One column too few, and kernels that take what lies beyond the table for no rotation."""
    from torch.nn.functional import pad

    from smoke.kernels.absorb import api as absorb
    from smoke.kernels.mla_rope import api as mla_rope
    from smoke.model import deepseek

    full, checked = deepseek.rope_table, mla_rope.checked_tables

    def narrow(*args: Any, **kwargs: Any) -> Any:
        cos_PR, sin_PR = full(*args, **kwargs)
        return cos_PR[:, :-1], sin_PR[:, :-1]

    def unnoticed(cos_PR: Any, sin_PR: Any, positions_T: Any, rope_dim: int, x: Any) -> Any:
        missing = rope_dim // 2 - cos_PR.shape[-1]
        wide = pad(cos_PR, (0, missing), value=1.0), pad(sin_PR, (0, missing))
        return checked(*wide, positions_T, rope_dim, x)

    with (
        replaced(deepseek, "rope_table", narrow),
        replaced(mla_rope, "checked_tables", unnoticed),
        replaced(absorb, "checked_tables", unnoticed),
    ):
        yield


@contextlib.contextmanager
def mscale_dropped_from_scores() -> Iterator[None]:
    from smoke.model import mla

    def plain(config: Any) -> float:
        return (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5

    with replaced(mla, "softmax_scale", plain):
        yield


@contextlib.contextmanager
def mscale_on_tables_too() -> Iterator[None]:
    from smoke.model import rope

    magnitude = rope.table_magnitude

    def twice(scaling: Any) -> float:
        return magnitude(scaling) * (1.0 if scaling is None else rope._m(scaling.factor, scaling.mscale_all_dim))

    with replaced(rope, "table_magnitude", twice):
        yield


@contextlib.contextmanager
def half_split() -> Iterator[None]:
    """Columns i and R/2 + i rotated together, in place of the neighbours 2i and 2i + 1; its gradient is right."""
    import torch

    from smoke.kernels.absorb import reference as absorb
    from smoke.kernels.mla_rope import reference
    from smoke.kernels.support import triton_missing

    rotate = reference.rotate

    def halves(x: Any, tables: Any, inverse: bool = False) -> Any:
        return apart(rotate(x, tables, True)) if inverse else rotate(interleaved(x), tables)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(reference, "rotate", halves))
        stack.enter_context(replaced(absorb, "rotate", halves))
        if torch.cuda.is_available() and not triton_missing():
            stack.enter_context(_half_split_kernels())
        yield


@contextlib.contextmanager
def _half_split_kernels() -> Iterator[None]:
    from smoke.kernels.mla_rope import triton as kernels

    rotate, key_value, key_value_grad = kernels.rotate_into, kernels.key_value_into, kernels.key_value_grad_into

    def halves(copy: Any, pe: Any, copied: Any, out: Any, tables: Any, inverse: bool = False, **blocks: Any) -> None:
        if not inverse:
            rotate(copy, interleaved(pe), copied, out, tables, **blocks)
            return
        rotate(copy, pe, copied, found := out.new_empty(out.shape), tables, True, **blocks)
        out.copy_(apart(found))

    def halves_grad(dkey: Any, dvalue: Any, dkv: Any, dk_pe: Any, *rest: Any) -> None:
        key_value_grad(dkey, dvalue, dkv, found := dk_pe.new_empty(dk_pe.shape), *rest)
        dk_pe.copy_(apart(found))

    with (
        replaced(kernels, "rotate_into", halves),
        replaced(kernels, "key_value_into", lambda kv, k_pe, *rest: key_value(kv, interleaved(k_pe), *rest)),
        replaced(kernels, "key_value_grad_into", halves_grad),
    ):
        yield


def interleaved(x: Any) -> Any:
    """Columns of the two halves, taken by turns."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def apart(x: Any) -> Any:
    """The reverse of ``interleaved``."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


FAULTS = (
    Fault(
        name="narrow-rope-table",
        row=7,
        summary="the cos/sin table is a column narrower than the rotated pairs, and no kernel notices",
        red=("rope_contract", "preflight"),
        where="15 columns for 16 rotated pairs",
        inject=narrow_table,
    ),
    Fault(
        name="mscale-dropped-from-scores",
        row=9,
        summary="YaRN's mscale is missing from the softmax scale",
        red=("rope_contract",),
        where="softmax scale",
        inject=mscale_dropped_from_scores,
    ),
    Fault(
        name="mscale-on-tables-too",
        row=9,
        summary="YaRN's mscale of the softmax scale is put on cos and sin as well",
        red=("rope_contract",),
        where="cos and sin",
        inject=mscale_on_tables_too,
    ),
    Fault(
        name="half-split-rotation",
        row=10,
        summary="columns of the two halves are rotated together, in place of neighbours",
        red=("rope_contract",),
        where="at position",
        inject=half_split,
    ),
)
