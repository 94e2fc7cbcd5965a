"""The LightningModule and its optimizer: losses, AdamW on float32 masters, nothing else.

Every label weighs the same, also where several micro-batches make one optimizer step. Their labels are unevenly many
(packing, masked prompts), so the mean of their means would weigh a label of a short micro-batch more. Such batches
bring the mean counts of their step (``smoke.data.module``), the loss divides its sums by those, and then the mean over
the micro-batches, which is what Lightning takes, is the loss of one large batch. Their gradients add up in float32, as
Megatron-core's do: in BF16 each addition would round.

No precision, no kernel and no measuring lives here. ``train_step`` is the same step without a Trainer, for the
trajectories that the parity checks run; a test holds it bit-equal to Lightning's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoke.config import TrainConfig
from smoke.model.deepseek import DeepseekV3
from smoke.model.layers import wide_dtype

IGNORED_LABEL = -100
Batch = dict[str, Tensor]


class MasterAdamW(torch.optim.Optimizer):
    """AdamW on float32 masters of the parameters, which keep their own dtype (BF16), as in Megatron-core.

    Each step casts the gradients to float32, updates the masters and rounds them into the parameters. With BF16 alone
    a norm weight of 1.0 would not move at usual learning rates. Masters are part of ``state_dict``.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        inner_groups = [
            {**group, "params": [p.detach().float().clone() for p in group["params"]]} for group in self.param_groups
        ]
        self.inner = torch.optim.AdamW(inner_groups, fused=True)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every (parameter, float32 master)."""
        return [
            pair
            for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True)
            for pair in zip(outer["params"], inner["params"], strict=True)
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key in ("lr", "weight_decay", "betas", "eps")})
        pairs = self.pairs()
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        torch._foreach_copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])
        for _, master in pairs:
            master.grad = None
        return result

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "masters": [m.clone() for _, m in self.pairs()],
            "inner": self.inner.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.inner.load_state_dict(state_dict["inner"])
        for (_, master), saved in zip(self.pairs(), state_dict["masters"], strict=True):
            master.copy_(saved)


class SmokeModule(lightning.LightningModule):
    """Next-token and multi-token-prediction losses of a DeepSeek-V3-shaped model.

    ``accumulates``: several micro-batches make a step, so gradients of BF16 parameters are float32.
    """

    def __init__(self, model: DeepseekV3, train: TrainConfig, *, mtp_loss_weight: float, accumulates: bool = False):
        super().__init__()
        self.model, self.train_config, self.mtp_loss_weight = model, train, mtp_loss_weight
        if accumulates:
            for parameter in model.parameters():
                parameter.grad_dtype = torch.float32

    def loss(self, batch: Batch) -> Tensor:
        """Scalar float32 loss: cross entropy over labels that are not ignored, plus MTP and balance terms.

        The terms are means over the batch's own labels and sequences, or, with ``mean_counts`` in the batch, sums
        divided by those.
        """
        out = self.model(batch)
        labels, next_labels, sequences = batch.get("mean_counts", (None, None, None))
        aux_loss = (
            out.aux_loss if sequences is None else out.aux_loss * (_sequences(batch) / sequences).to(out.aux_loss)
        )
        loss = _cross_entropy(out.logits_TV, out.labels_T, labels) + aux_loss
        if out.mtp_logits_TV is not None:
            assert out.mtp_labels_T is not None
            loss = loss + self.mtp_loss_weight * _cross_entropy(out.mtp_logits_TV, out.mtp_labels_T, next_labels)
        return loss

    def forward(self, batch: Batch) -> Tensor:
        """The loss, so that ``functional_call`` can ask a twin for it."""
        return self.loss(batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self._trainer is not None and self.trainer.progress_bar_callback is not None:
            self.log("loss", loss.detach(), prog_bar=True, batch_size=1)
        return loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A run that asks for more steps has more batches: what was the last one of a shorter run is not any more."""
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False

    def configure_optimizers(self) -> MasterAdamW:
        return make_optimizer(self.model, self.train_config)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.model.after_optimizer_step()


def make_optimizer(model: nn.Module, train: TrainConfig) -> MasterAdamW:
    """AdamW with weight decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return MasterAdamW(
        groups,
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
    )


def train_step(
    module: SmokeModule,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    context: Callable[[], AbstractContextManager],
    on_gradients: Callable[[], None] = lambda: None,
    *,
    clip: float | None = None,
) -> Tensor:
    """One optimizer step without a Trainer, in Lightning's order and arithmetic.

    Args:
        module: its gradients are empty, and will be again.
        optimizer: of the module.
        micro_batches: of one step.
        context: surrounds each forward only, as Lightning's does.
        on_gradients: called when all gradients are there, before they are clipped.
        clip: largest norm of the gradients.

    Returns:
        The step's loss, the mean over the micro-batches: float64, 0-d.
    """
    shares = []
    for batch in micro_batches:
        with context():
            loss = module.loss(batch)
        share = loss / len(micro_batches)
        share.backward()
        shares.append(share.detach().double())
    on_gradients()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
    optimizer.step()
    module.model.after_optimizer_step()
    optimizer.zero_grad()
    return torch.stack(shares).sum()


def _cross_entropy(logits_TV: Tensor, labels_T: Tensor, mean_count: Tensor | None) -> Tensor:
    logits_TV = logits_TV.to(wide_dtype(logits_TV.dtype))
    if mean_count is None:
        return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED_LABEL)
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED_LABEL, reduction="sum") / mean_count.to(logits_TV)


def _sequences(batch: Batch) -> int:
    """Sequences of a batch: rows (sbhd) or parts of the pack (thd)."""
    return len(batch["cu_seqlens"]) - 1 if "cu_seqlens" in batch else len(batch["tokens"])
