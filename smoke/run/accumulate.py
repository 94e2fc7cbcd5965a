"""What accumulation_parity measures: k micro-batches against one batch that holds them all.

The comparison goes through Lightning's own accumulation, once with three micro-batches and once with one batch, from
the live weights in float64, where only a mistake can make a difference. Their labels are unevenly many: all, half and a
quarter, so that a mean of means is seen. Tokens are drawn over the whole vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from smoke.data.packing import loss_counts
from smoke.model.deepseek import DeepseekV3
from smoke.module import IGNORED_LABEL, Batch, SmokeModule
from smoke.numerics import relative_norm
from smoke.record import AccumulationRow
from smoke.run.fit import quiet_lightning
from smoke.run.session import Session

COUNT = 3


class _Keep(lightning.Callback):
    """Gradients before the optimizer takes them, and the losses as Lightning divides them."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.loss = 0.0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients = {n: p.grad.detach().clone() for n, p in pl_module.named_parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.loss += float(outputs["loss"])


def accumulation_rows(session: Session) -> list[AccumulationRow]:
    """A row for the loss and for each gradient. Leaves the live module and the random states alone."""
    window, whole = uneven(session)
    many, one = _train(session, window), _train(session, [whole])
    left, right = (torch.tensor([kept.loss], dtype=torch.float64) for kept in (many, one))
    pairs: list[tuple[str, Tensor, Tensor]] = [("", left, right)]
    for name in dict.fromkeys([*one.gradients, *many.gradients]):
        found = [kept.gradients.get(name) for kept in (many, one)]
        zero = torch.zeros_like(next(gradient for gradient in found if gradient is not None))
        left, right = (zero if gradient is None else gradient for gradient in found)
        pairs.append((name.removeprefix("model."), left, right))
    return [
        AccumulationRow(
            name=name, micro_batches=len(window), relative_error=relative_norm(left, right), elements=right.numel()
        )
        for name, left, right in pairs
    ]


def uneven(session: Session) -> tuple[list[Batch], Batch]:
    """Three micro-batches of one row or of a pack of two sequences, and one batch of the same sequences."""
    config, device = session.plan.config, session.plan.device
    length = min(48, config.data.micro_batch_size * config.data.sequence_length, config.model.max_position_embeddings)
    generator, window = torch.Generator().manual_seed(0), []
    for number in range(COUNT):
        row = torch.randint(config.model.vocab_size, (length + 1,), generator=generator)
        batch = {"tokens": row[:-1], "labels": row[1:].clone(), "positions": torch.arange(length)}
        if config.layout == "thd":
            cut = max(1, length * 2 // 3)
            batch["positions"] = torch.cat([torch.arange(cut), torch.arange(length - cut)])
            batch["cu_seqlens"] = torch.tensor([0, cut, length] if length > cut else [0, length], dtype=torch.int32)
            batch["labels"][batch["cu_seqlens"][1:].long() - 1] = IGNORED_LABEL
        else:
            batch = {name: value[None] for name, value in batch.items()}
        batch["labels"][..., max(2, length // 2**number) :] = IGNORED_LABEL
        window.append(batch)
    whole = {name: torch.cat([batch[name] for batch in window]) for name in ("tokens", "labels", "positions")}
    if config.layout == "thd":
        edges = [batch["cu_seqlens"][1:] + number * length for number, batch in enumerate(window)]
        whole["cu_seqlens"] = torch.cat([window[0]["cu_seqlens"][:1], *edges])
    counts = [loss_counts({name: value.numpy() for name, value in batch.items()}) for batch in window]
    for batch in window:
        batch["mean_counts"] = torch.from_numpy(sum(counts) / COUNT)
    move = lambda batch: {name: value.to(device) for name, value in batch.items()}  # noqa: E731
    return [move(batch) for batch in window], move(whole)


def _train(session: Session, batches: list[Batch]) -> _Keep:
    """One optimizer step of Lightning on the live weights in float64."""
    config, kept = session.plan.config, _Keep()
    model = DeepseekV3(config.model, layout=config.layout, dtype=torch.float64, device=session.plan.device)
    model.load_state_dict(session.model.state_dict())
    module = SmokeModule(model, config.train, mtp_loss_weight=config.model.mtp_loss_weight)
    with quiet_lightning():
        trainer = lightning.Trainer(
            max_steps=1,
            max_epochs=1,
            accumulate_grad_batches=len(batches),
            accelerator="gpu" if session.plan.device.startswith("cuda") else "cpu",
            devices=1,
            callbacks=[kept],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
        )
        loader = DataLoader(cast("Dataset[Batch]", batches), batch_size=None, generator=torch.Generator())
        trainer.fit(module, loader)
    return kept
