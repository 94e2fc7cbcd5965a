"""What rope_contract judges: tables, scales, positions and kernels of the rotary embedding, against an oracle.

Tables and scales are taken from the live model, and from one whose mscale differs from its mscale_all_dim, since equal
ones hide each other. Positions of packed sequences and of context-parallel ranks are compared with lists written by
plain counting, and what is rotated by them with the same tokens rotated elsewhere. The kernels are those that the run
uses (``smoke.run.rope_kernels``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from smoke.checks.rope import POSITIONS
from smoke.config import ModelConfig
from smoke.kernels.mla_rope.api import rope_query
from smoke.model.mla import MLASelfAttention
from smoke.model.rope import positions_context_parallel, positions_packed, rope_table
from smoke.numerics import first_mismatch
from smoke.record import RopeRow
from smoke.run.interpreted import interpreted_rows
from smoke.run.rope_cases import UNEQUAL, Case, Rotation
from smoke.run.rope_kernels import SIZES, kernel_rows
from smoke.run.rope_oracle import softmax_scale, turns
from smoke.run.session import Session

EDGES = (0, 5, 6, 11, 24)
"""Packed sequences of the positions test: one has a single token."""
RANKS = 3
"""Context-parallel ranks of the positions test, over as many tokens."""


def rope_rows(session: Session) -> list[RopeRow]:
    """Every row of the live model and of the kernels that it runs, and of Triton's in its interpreter where asked."""
    config, impl, device = session.plan.config.model, session.plan.impl, session.plan.device
    live = Case(
        impl, config.num_attention_heads, config.qk_nope_head_dim, Rotation.of(config, device), torch.bfloat16, device
    )
    rows = [*_live_rows(session), *table_rows(config), *kernel_rows(impl, device, config, SIZES, [live])]
    if session.plan.config.check.triton_interpreter and impl != "triton":
        rows += interpreted_rows()
    return rows + position_rows(impl, device)


def table_rows(base: ModelConfig) -> list[RopeRow]:
    """Tables and softmax scale of the model's configuration, and with unequal corrections."""
    rows: list[RopeRow] = []
    for name, config in {
        "the model's YaRN": base,
        "mscale and mscale_all_dim unequal": replace(base, rope_scaling=UNEQUAL),
    }.items():
        longest = max(config.max_position_embeddings, POSITIONS[-1] + 1)
        config = replace(config, max_position_embeddings=longest)
        rows += _table_errors(name, rope_table(config, length=POSITIONS[-1] + 1), config, POSITIONS)
        rows.append(_scale_row(name, "softmax scale", MLASelfAttention(config, device="meta"), config))
    return rows


def _live_rows(session: Session) -> list[RopeRow]:
    """The tables that the model keeps for its batches, and the scale of each of its attention modules."""
    config, model = session.plan.config.model, session.model
    positions_T = torch.cat([batch["positions"].flatten() for batch in session.batches])
    tables = model.rope_tables(positions_T)
    places = sorted({0, 1, int(positions_T.max())} & set(range(tables[0].shape[0])))
    rows = _table_errors("live tables", tables, config, places)
    attentions = session.attentions().items()
    return rows + [_scale_row("live model", f"softmax scale of {name}", module, config) for name, module in attentions]


def _scale_row(case: str, tensor: str, attention: MLASelfAttention, config: ModelConfig) -> RopeRow:
    error = abs(attention.scale / softmax_scale(config) - 1.0) / torch.finfo(torch.float64).eps
    return RopeRow(kind="scale", case=case, tensor=tensor, position=None, value=error)


def _table_errors(
    case: str, tables: tuple[Tensor, Tensor], config: ModelConfig, positions: Sequence[int]
) -> list[RopeRow]:
    """A row for each position: the larger error of cos and sin, relative to their magnitude; inf for another width."""
    wanted = turns(config, positions)
    rows = []
    for position, want_R in zip(positions, wanted, strict=True):
        got_R = [table[position].double().cpu() for table in tables]
        fits = all(got.shape == want_R.shape for got in got_R)
        error = torch.stack([got_R[0] - want_R.real, got_R[1] - want_R.imag]).abs().max() if fits else math.inf
        value = float(error / want_R.abs().max() / torch.finfo(torch.float32).eps)
        tensor = "cos and sin" if fits else f"{len(got_R[0])} columns for {len(want_R)} rotated pairs"
        rows.append(RopeRow(kind="table", case=case, tensor=tensor, position=position, value=value))
    return rows


def position_rows(impl: str, device: str) -> list[RopeRow]:
    """Packed sequences and context-parallel ranks: their positions, and what is rotated by them."""
    length = EDGES[-1]
    q_TND = torch.randn(length, 2, 8, generator=torch.Generator().manual_seed(1)).to(device)
    cos_PR, sin_PR = rope_table(ModelConfig(qk_rope_head_dim=6, rope_scaling=UNEQUAL), device, length=length)

    def rotated(tokens: Iterable[int], positions_T: Tensor) -> Tensor:
        chosen_TND = q_TND[list(tokens)]
        return rope_query(chosen_TND, cos_PR, sin_PR, positions_T.to(device), rope_dim=6, impl=impl)

    counted = [place for start, stop in zip(EDGES, EDGES[1:], strict=False) for place in range(stop - start)]
    packed_T = positions_packed(torch.tensor(EDGES, dtype=torch.int32))
    apart = [
        rotated(range(start, stop), torch.arange(stop - start)) for start, stop in zip(EDGES, EDGES[1:], strict=False)
    ]
    rows = list(_position_row("packed", packed_T, counted, rotated(range(length), packed_T), torch.cat(apart)))
    whole_TND = rotated(range(length), torch.arange(length))
    for rank in range(RANKS):
        chunk = length // (2 * RANKS)
        held = [chunk * part + i for part in (rank, 2 * RANKS - 1 - rank) for i in range(chunk)]
        here_T = positions_context_parallel(length, RANKS, rank)
        rows += _position_row(
            f"context-parallel rank {rank} of {RANKS}", here_T, held, rotated(held, here_T), whole_TND[held]
        )
    return rows


def _position_row(
    case: str, positions_T: Tensor, counted: Sequence[int], got_TND: Tensor, want_TND: Tensor
) -> Iterator[RopeRow]:
    wrong = int((positions_T != torch.tensor(counted)).sum())
    found = first_mismatch(got_TND, want_TND)
    for tensor, count in (("positions", wrong), ("rotated query", 0 if found is None else found.mismatches)):
        yield RopeRow(kind="positions", case=case, tensor=tensor, position=None, value=float(count))
