"""Which parameters need no gradient in a step: all of them in a recipe's warm-up, later the experts without work.

An expert's gradient is zero, rightly, if it got no token whose label counts. An ignored label stands at the end of a
packed sequence, or of any sequence in the prediction module, and nothing behind it attends to that token. So the count
of tokens is not enough: with many experts, one whose only token is a sequence's last is common.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smoke.model.attention import Sequences
from smoke.model.mtp import next_labels
from smoke.model.routing import Router
from smoke.module import IGNORED_LABEL, Batch
from smoke.run.session import Session


class Idle:
    """Called once after each step's last backward: names of the parameters of which no gradient is expected.

    Forward hooks, which only read, note each micro-batch and what every router chose.
    """

    def __init__(self, session: Session):
        self._session = session
        self._seen: list[tuple[Batch, dict[str, Tensor]]] = []
        session.model.register_forward_pre_hook(self._see_batch)
        for name, module in session.model.named_modules():
            if isinstance(module, Router):
                module.register_forward_hook(partial(self._see_choices, name.removesuffix(".router")))

    def __call__(self) -> Collection[str]:
        seen, self._seen = self._seen, []
        if self._session.module.global_step < self._session.plan.recipe.warmup_steps:
            return [name for name, _ in self._session.model.named_parameters()]
        return set.intersection(*(self._idle_in(batch, choices) for batch, choices in seen))

    def _idle_in(self, batch: Batch, choices: dict[str, Tensor]) -> set[str]:
        """Names of the experts' weights that have no work in one micro-batch."""
        config, labels_T = self._session.plan.config, batch["labels"].flatten()
        counts = {"main": labels_T != IGNORED_LABEL}
        if config.model.num_nextn_predict_layers:
            counts["mtp"] = next_labels(labels_T, Sequences.of(batch, config.layout)) != IGNORED_LABEL
        return {
            f"{layer}.experts.linear_fc{part}.weight{expert}"
            for layer, experts_TK in choices.items()
            for expert in without_work(
                experts_TK, counts["mtp" if layer.startswith("mtp.") else "main"], config.model.n_routed_experts
            )
            for part in (1, 2)
        }

    def _see_batch(self, model: Any, args: tuple[Batch, ...]) -> None:
        if model.training and torch.is_grad_enabled():
            self._seen.append((args[0], {}))

    def _see_choices(self, layer: str, router: Router, args: Any, routing: Any) -> None:
        if router.training and torch.is_grad_enabled():
            self._seen[-1][1][layer] = routing.experts_TK


def without_work(experts_TK: Tensor, counts_T: Tensor, experts: int) -> list[int]:
    """Experts that no token chose whose label counts: choices int64 [T, K], mask bool [T] -> expert numbers."""
    chosen = torch.zeros(experts, dtype=torch.bool, device=experts_TK.device)
    chosen[experts_TK[counts_T].flatten()] = True
    return (~chosen).nonzero().flatten().tolist()
