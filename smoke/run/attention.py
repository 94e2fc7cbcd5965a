"""Which kernels ran core attention: the counts of the live model's attention modules as rows."""

from __future__ import annotations

from smoke.record import AttentionRow
from smoke.run.session import Session


def attention_rows(session: Session) -> list[AttentionRow]:
    """A row for each attention module and kernel; one without a kernel where a module made no call."""
    rows = []
    for name, attention in session.attentions().items():
        rows += [
            AttentionRow(module=name, backend=kernel.backend, dtype=kernel.dtype, columns=kernel.columns, calls=calls)
            for kernel, calls in attention.core_kernels.items()
        ]
        if not attention.core_kernels:
            rows.append(AttentionRow(module=name, backend="", dtype="", columns=0, calls=0))
    return rows


def forget_kernels(session: Session) -> None:
    """Begin to count from zero."""
    for attention in session.attentions().values():
        attention.core_kernels.clear()
