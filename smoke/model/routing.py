"""The router of a mixture-of-experts layer: which experts a token goes to, and with what weight.

Scores are sigmoids of float32 logits. A bias, moved by a sign rule after each optimizer step, balances the load: it
takes part in the choice of experts and not in their weights (balancing without an auxiliary loss). The choice is
limited to the best groups of experts, a group being worth the sum of its two best biased scores. A small sequence-wise
auxiliary loss keeps single sequences from extremes. Equal scores go to the lower expert number, on every device.

``record_routing`` notes every choice of experts; ``replay_routing`` imposes the recorded choices on another forward of
the same batch, which then computes weights from its own scores. Two forwards that differ by rounding can so be compared
without a flipped expert drowning the comparison.

After "DeepSeek-V3 Technical Report", section 2.1.2. Shape letters: T tokens, H width, E experts, G groups, K choices,
Q sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from smoke.config import ModelConfig
from smoke.kernels.support import product
from smoke.model.attention import Sequences
from smoke.model.layers import wide_dtype


@dataclass
class RoutingTape:
    """Expert choices [T, K] of each router, in the order of its calls."""

    choices: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass
class _Replay:
    tape: RoutingTape
    position: dict[str, int] = field(default_factory=dict)

    def next_choice(self, router: str) -> Tensor:
        index = self.position.get(router, 0)
        choices = self.tape.choices.get(router, [])
        if index >= len(choices):
            raise RuntimeError(f"routing tape: call {index} of {router} was not recorded ({len(choices)} calls are)")
        self.position[router] = index + 1
        return choices[index]


_recording: ContextVar[RoutingTape | None] = ContextVar("recording", default=None)
_replaying: ContextVar[_Replay | None] = ContextVar("replaying", default=None)


@contextlib.contextmanager
def record_routing() -> Iterator[RoutingTape]:
    """Record the expert choices of every router that runs inside."""
    tape = RoutingTape()
    token = _recording.set(tape)
    try:
        yield tape
    finally:
        _recording.reset(token)


@contextlib.contextmanager
def replay_routing(tape: RoutingTape) -> Iterator[None]:
    """Impose recorded choices; loads are not counted inside. RuntimeError for a call that was not recorded."""
    token = _replaying.set(_Replay(tape))
    try:
        yield
    finally:
        _replaying.reset(token)


class _Logits(torch.autograd.Function):
    """x w^T in the weight's type; keeps x in its own type, not a float32 copy of it."""

    @staticmethod
    def forward(ctx, x_TH: Tensor, w_EH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, w_EH)
        return product(x_TH.to(w_EH.dtype), w_EH.mT)

    @staticmethod
    def backward(ctx, dy_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TH, w_EH = ctx.saved_tensors
        dx_TH = product(dy_TE, w_EH).to(x_TH.dtype) if ctx.needs_input_grad[0] else None
        dw_EH = product(dy_TE.mT, x_TH.to(w_EH.dtype)) if ctx.needs_input_grad[1] else None
        return dx_TH, dw_EH


def choose_experts(scores_TE: Tensor, count: int, groups: int, groups_kept: int) -> Tensor:
    """Indices [T, K] of the ``count`` best experts within the ``groups_kept`` best groups, best first."""
    if groups_kept < groups:
        scores_TGe = scores_TE.unflatten(-1, (groups, -1))
        worth_TG = scores_TGe.topk(min(2, scores_TGe.shape[-1]), dim=-1).values.sum(-1)
        kept_Tg = worth_TG.sort(dim=-1, descending=True, stable=True).indices[:, :groups_kept]
        dropped_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter_(1, kept_Tg, False)
        scores_TE = scores_TGe.masked_fill(dropped_TG.unsqueeze(-1), float("-inf")).flatten(1)
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


@dataclass(frozen=True)
class Routing:
    """A router's answer for one batch."""

    experts_TK: Tensor
    """Chosen experts, int64, best first."""
    weights_TK: Tensor
    """Their weights, float32 (float64 in a float64 model), scaled by routed_scaling_factor."""
    tokens_E: Tensor
    """Tokens that each expert got, in the weights' type."""
    aux_loss: Tensor
    """Sequence-wise auxiliary loss, times aux_loss_alpha."""


class Router(nn.Module):
    """Float32 router. ``label`` names it on a routing tape; ``count_load`` False stops the load counter.

    The weight of a single choice is its score, normalised or not (as in Megatron-core): normalised it would be 1
    whatever the score, and the router would learn from the auxiliary loss alone.
    """

    expert_bias: Tensor
    expert_load: Tensor

    def __init__(self, config: ModelConfig, label: str, *, dtype: torch.dtype = torch.bfloat16, device=None):
        super().__init__()
        self.config, self.label, self.count_load = config, label, True
        experts, wide = config.n_routed_experts, wide_dtype(dtype)
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size, dtype=wide, device=device))
        self.register_buffer("expert_bias", torch.zeros(experts, dtype=torch.float32, device=device))
        self.register_buffer("expert_load", torch.zeros(experts, dtype=torch.float32, device=device))

    def forward(self, x_TH: Tensor, sequences: Sequences) -> Routing:
        """x [T, H] -> choices, weights, counts and auxiliary loss."""
        config = self.config
        scores_TE = _Logits.apply(x_TH, self.weight).sigmoid()
        experts_TK = self._choose(scores_TE.detach())
        weights_TK = scores_TE.gather(1, experts_TK)
        if config.norm_topk_prob and config.num_experts_per_tok > 1:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        chosen_TE = torch.zeros_like(scores_TE).scatter_(1, experts_TK, 1.0)
        tokens_E = chosen_TE.sum(0)
        if self.training and self.count_load and torch.is_grad_enabled() and _replaying.get() is None:
            self.expert_load += tokens_E
        raw_TK = choose_experts(scores_TE.detach(), config.num_experts_per_tok, 1, 1)
        raw_TE = torch.zeros_like(scores_TE).scatter_(1, raw_TK, 1.0)
        aux_loss = config.aux_loss_alpha * self._balance_loss(scores_TE, raw_TE, sequences)
        return Routing(experts_TK, weights_TK * config.routed_scaling_factor, tokens_E, aux_loss)

    def update_bias(self, speed: float) -> None:
        """Lift the bias of experts that got less than the mean load by ``speed``, lower the others; clear the load."""
        with torch.no_grad():
            self.expert_bias += speed * torch.sign(self.expert_load.mean() - self.expert_load)
            self.expert_load.zero_()

    def _choose(self, scores_TE: Tensor) -> Tensor:
        config, replay, tape = self.config, _replaying.get(), _recording.get()
        if replay is not None:
            experts_TK = replay.next_choice(self.label)
            expected = (scores_TE.shape[0], config.num_experts_per_tok)
            if tuple(experts_TK.shape) != expected:
                raise RuntimeError(f"routing tape: {self.label} recorded {tuple(experts_TK.shape)}, needs {expected}")
        else:
            biased_TE = scores_TE + self.expert_bias
            experts_TK = choose_experts(biased_TE, config.num_experts_per_tok, config.n_group, config.topk_group)
        if tape is not None:
            tape.choices.setdefault(self.label, []).append(experts_TK)
        return experts_TK

    def _balance_loss(self, scores_TE: Tensor, chosen_TE: Tensor, sequences: Sequences) -> Tensor:
        """Mean over sequences of sum_i f_i P_i: share of choices (1 if balanced) times mean normalised score.

        The choices are those of the scores alone, without bias and groups (equation 18 of the report).
        """
        mean_QT = sequences.mean_weights(scores_TE.dtype)
        share_QE = (mean_QT @ chosen_TE) * (self.config.n_routed_experts / self.config.num_experts_per_tok)
        score_QE = mean_QT @ (scores_TE / scores_TE.sum(-1, keepdim=True))
        return (share_QE * score_QE).sum(-1).mean()

    def extra_repr(self) -> str:
        return f"{self.label}, experts={self.config.n_routed_experts}"
