"""Faults of tensors that are saved for backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from smoke.faults.fault import Fault, replaced


@contextlib.contextmanager
def query_memory_reused() -> Iterator[None]:
    """The joined query is put where the unrotated one was, which the K up-projection has saved for its gradient.

    Only where something is recomputed: elsewhere (in the BF16 twin, say) this program would stop by itself.
    """
    from smoke.model.mla import MLASelfAttention

    up, project, queries = MLASelfAttention._up_absorbed, MLASelfAttention._query, []

    def kept(attention: Any, query_in_TQ: Any) -> Any:
        queries.append(project(attention, query_in_TQ))
        return queries[-1]

    def in_place(attention: Any, *args: Any, **kwargs: Any) -> Any:
        joined = up(attention, *args, **kwargs)
        query_TND = queries.pop().detach()
        if attention.recompute.regions:
            width = min(query_TND.shape[-1], joined[0].shape[-1])
            query_TND[..., :width].copy_(joined[0].detach()[..., :width])
        return joined

    with replaced(MLASelfAttention, "_query", kept), replaced(MLASelfAttention, "_up_absorbed", in_place):
        yield


FAULTS = (
    Fault(
        name="query-memory-reused",
        row=6,
        summary="rope writes the joined query into memory that the K up-projection has saved for backward",
        red=("saved_tensors",),
        may_follow=("gradient_parity",),
        where="self_attention.k_up_absorbed (region mla_up_proj)",
        inject=query_memory_reused,
    ),
)
