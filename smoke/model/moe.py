"""Mixture of experts: dispatch to the routed experts, their MLPs, combination, and the shared experts.

Tokens are sorted by expert and each expert's rows are padded with zeros to a multiple (``row_multiple``, the legal row
count of a precision recipe), so that no quantization block spans two experts. A padding row counts neither in the load
nor in the tokens, and an expert may get no token at all.

Dispatch and combination are each other's transpose, and both are gathers: ``spread`` copies each token to its K rows,
``collect`` adds a token's K rows in a fixed order. No atomic addition, hence the same bits in every run. The routing
weights are put on the activation, before the second projection (as Megatron-core does), so that combination has
nothing to keep for backward.

Shape letters: T tokens, K choices of a token, P padded rows, H width, I inner width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smoke.config import ModelConfig
from smoke.model.attention import Sequences
from smoke.model.layers import DenseMLP, swiglu, wide_dtype
from smoke.model.linear import GroupedLinear
from smoke.model.recompute import Recompute
from smoke.model.routing import Router


@dataclass(frozen=True)
class Dispatch:
    """Where each choice of each token goes. int64."""

    rows: list[int]
    """Padded rows of each expert."""
    source_P: Tensor
    """Index (t * K + k) of the choice that fills each row; 0 for padding."""
    slot_TK: Tensor
    """Row of each choice."""
    padding: Tensor | None
    """Rows that are padding, if any."""


def plan_dispatch(experts_TK: Tensor, tokens_E: Tensor, multiple: int) -> Dispatch:
    """Sort the choices by expert (stable: by token inside an expert) and pad each expert's rows."""
    device = experts_TK.device
    expert_n, order_n = experts_TK.flatten().sort(stable=True)
    counts_E = tokens_E.long()
    padded_E = (counts_E + multiple - 1) // multiple * multiple
    shift_E = (padded_E.cumsum(0) - padded_E) - (counts_E.cumsum(0) - counts_E)
    row_n = torch.arange(order_n.shape[0], device=device) + shift_E[expert_n]
    rows = padded_E.tolist()
    source_P = torch.zeros(sum(rows), dtype=torch.int64, device=device)
    source_P[row_n] = order_n
    slot_n = torch.empty_like(row_n)
    slot_n[order_n] = row_n
    padding = None
    if source_P.shape[0] > order_n.shape[0]:
        filled_P = torch.zeros_like(source_P, dtype=torch.bool)
        filled_P[row_n] = True
        padding = (~filled_P).nonzero().squeeze(1)
    return Dispatch(rows, source_P, slot_n.view_as(experts_TK), padding)


def _spread(x_TH: Tensor, choices: int, plan: Dispatch) -> Tensor:
    y_PH = x_TH.index_select(0, plan.source_P // choices if choices > 1 else plan.source_P)
    return y_PH if plan.padding is None else y_PH.index_fill_(0, plan.padding, 0)


def _collect(y_PH: Tensor, choices: int, plan: Dispatch) -> Tensor:
    rows_nH = y_PH.index_select(0, plan.slot_TK.flatten())
    if choices == 1:
        return rows_nH
    rows_TKH = rows_nH.unflatten(0, (-1, choices))
    if rows_TKH.is_cuda:
        return rows_TKH.sum(1)  # adds in float32; the same call is seven times slower than the loop on a CPU
    total_TH = rows_TKH[:, 0].to(wide_dtype(y_PH.dtype))
    for choice in range(1, choices):
        total_TH = total_TH + rows_TKH[:, choice]
    return total_TH.to(y_PH.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH: Tensor, choices: int, plan: Dispatch) -> Tensor:
        ctx.choices, ctx.plan = choices, plan
        return _spread(x_TH, choices, plan)

    @staticmethod
    def backward(ctx, dy_PH: Tensor) -> tuple[Tensor, None, None]:
        return _collect(dy_PH, ctx.choices, ctx.plan), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_PH: Tensor, choices: int, plan: Dispatch) -> Tensor:
        ctx.choices, ctx.plan = choices, plan
        return _collect(y_PH, choices, plan)

    @staticmethod
    def backward(ctx, dx_TH: Tensor) -> tuple[Tensor, None, None]:
        return _spread(dx_TH, ctx.choices, ctx.plan), None, None


def spread(x_TH: Tensor, plan: Dispatch) -> Tensor:
    """Each token's row, or each choice's (x [T*K, H]), to the rows of its experts -> [P, H]; padding rows are zero."""
    choices = plan.slot_TK.numel() // x_TH.shape[0]
    return _Spread.apply(x_TH, choices, plan)


def collect(y_PH: Tensor, plan: Dispatch) -> Tensor:
    """Sum of each token's K rows, in the order of its choices -> [T, H]."""
    return _Collect.apply(y_PH, plan.slot_TK.shape[1], plan)


class Experts(nn.Module):
    """Routed experts: two grouped products with SwiGLU between them."""

    def __init__(
        self, config: ModelConfig, recompute: Recompute, row_multiple: int, *, dtype: torch.dtype, device=None
    ):
        super().__init__()
        self.recompute, self.row_multiple = recompute, row_multiple
        experts, width, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.linear_fc1 = GroupedLinear(experts, width, 2 * inner, dtype=dtype, device=device)
        self.linear_fc2 = GroupedLinear(experts, inner, width, dtype=dtype, device=device)

    def forward(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, tokens_E: Tensor) -> Tensor:
        """x [T, H], choices, weights and counts of the router -> weighted sum of the experts, [T, H]."""
        plan = plan_dispatch(experts_TK, tokens_E, self.row_multiple)
        gate_up_P2I = self.linear_fc1(spread(x_TH, plan), plan.rows)
        weights_P = spread(weights_TK.flatten(), plan)
        with self.recompute.discard("moe_act", swiglu, gate_up_P2I, weights_P) as act_PI:
            out_PH = self.linear_fc2(act_PI, plan.rows)
        return collect(out_PH, plan)


class MoELayer(nn.Module):
    """Router, routed experts and the shared experts, which are one dense MLP."""

    def __init__(
        self,
        config: ModelConfig,
        label: str,
        recompute: Recompute | None = None,
        *,
        expert_row_multiple: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device=None,
    ):
        super().__init__()
        recompute = recompute or Recompute()
        self.router = Router(config, f"{label}.router", dtype=dtype, device=device)
        self.experts = Experts(config, recompute, expert_row_multiple, dtype=dtype, device=device)
        self.shared_experts = None
        if config.n_shared_experts:
            inner = config.n_shared_experts * config.moe_intermediate_size
            self.shared_experts = DenseMLP(
                config.hidden_size, inner, recompute=recompute, region="moe_act", dtype=dtype, device=device
            )

    def forward(self, x_TH: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """x [T, H] -> output [T, H] and the auxiliary loss (scalar)."""
        routing = self.router(x_TH, sequences)
        out_TH = self.experts(x_TH, routing.experts_TK, routing.weights_TK, routing.tokens_E)
        if self.shared_experts is not None:
            out_TH = out_TH + self.shared_experts(x_TH)
        return out_TH, routing.aux_loss
