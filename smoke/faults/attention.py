"""Faults of core attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from smoke.faults.fault import Fault, replaced


@contextlib.contextmanager
def unfused_attention() -> Iterator[None]:
    """The flag that forbids fused kernels, left behind by somebody: everything is right, and slow."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from smoke.model import attention

    fused = attention.scaled_dot_product_attention

    def unfused(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return fused(*args, **kwargs)

    with replaced(attention, "scaled_dot_product_attention", unfused):
        yield


FAULTS = (
    Fault(
        name="unfused-attention",
        row=31,
        summary="core attention silently takes the unfused path",
        red=("attention_backend",),
        where="self_attention",
        inject=unfused_attention,
    ),
)
