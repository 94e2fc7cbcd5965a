"""A small LightningModule with labels, dropout and a Trainer around it, for the callbacks' tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH = 11, 8


class Batches:
    """An iterable of fixed batches that Lightning takes for a data loader."""

    def __init__(self, items: list[dict[str, Tensor]]):
        self.items = items

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Toy(lightning.LightningModule):
    """Embedding, linear, dropout, linear; cross entropy over labels that are not -100.

    ``seen`` keeps the true losses, ``random_state`` that at the end of training.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.seen: list[float] = []
        self.random_state: Tensor | None = None

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.dropout(torch.relu(self.inner(self.embedding(batch["tokens"]))))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.append(float(loss.detach()))
        return loss

    def on_train_end(self) -> None:
        self.random_state = torch.get_rng_state()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saver(lightning.Callback):
    """Writes a checkpoint after the second step."""

    def __init__(self, path):
        self._path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            trainer.save_checkpoint(self._path)


def make_batches(count: int) -> list[dict[str, Tensor]]:
    """Batches of 2 x 5 tokens, of which one label each row, and one more in odd batches, is ignored."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for index in range(count):
        tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
        labels = tokens.roll(-1, 1)
        labels[:, -1] = -100
        labels[0, 0] = -100 if index % 2 else labels[0, 0]
        batches.append({"tokens": tokens, "labels": labels})
    return batches


def fit(
    module: lightning.LightningModule,
    items: list[dict[str, Tensor]],
    callbacks: list[lightning.Callback],
    ckpt_path: Any = None,
    weights_only: bool | None = None,
    validation: list[dict[str, Tensor]] | None = None,
    **options: Any,
) -> None:
    """Train one epoch on one CPU from a fixed random state; torch's own random state is left alone."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        **options,
    )
    held_out = None if validation is None else Batches(validation)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Lightning 2.6 asks torch 2.13's pytree whether a spec is a leaf in the way that torch has deprecated.
        warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated", category=FutureWarning)
        torch.manual_seed(7)
        trainer.fit(module, Batches(items), held_out, ckpt_path=ckpt_path, weights_only=weights_only)
