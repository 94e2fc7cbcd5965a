"""A plain GPT: are the gradients and losses of bf16-mixed training near enough to those of float32?

    python examples/plain_gpt.py

The model knows nothing of smoke. Batches are tuples, embedding and head share one weight, attention has dropout, and
the Trainer accumulates two batches and validates in between: none of it has to be told to the callbacks but how to
count the labels of a tuple.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any, Literal

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from smoke.callbacks import Finite, GradientParity, GradientPresence, LossTracker, Throughput, twin_reference
from smoke.verdict import Verdict, judge

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 64, 64, 4, 2, 16
STEPS, ACCUMULATED = 12, 2
Pair = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Causal attention and an MLP, both behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, length, width] -> the same shape."""
        query, key, value = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(lightning.LightningModule):
    """Embedding, blocks, and a head that is the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def loss(self, batch: Pair) -> Tensor:
        tokens, labels = batch
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.tokens(tokens) + self.places(places))
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), labels.flatten())

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Pair, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def loader(count: int, *, seed: int) -> DataLoader:
    """Sequences that count upwards by a step of their own: every next token can be learned."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        start, step = torch.randint(VOCABULARY, (2, 4, 1), generator=generator)
        row = (start + (1 + step % 3) * torch.arange(LENGTH + 1)) % VOCABULARY
        found.append((row[:, :-1], row[:, 1:]))
    return DataLoader(found, batch_size=None)  # type: ignore[arg-type]  # a list will do


def label_counts(batch: Pair) -> tuple[int, int]:
    """Label tokens and positions of a batch: here every label counts."""
    return batch[1].numel(), batch[1].numel()


def train(module: GPT, callbacks: list[lightning.Callback], precision: Literal["32-true", "bf16-mixed"]) -> None:
    torch.manual_seed(1)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision=precision,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=1.0,
        val_check_interval=10,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(STEPS * ACCUMULATED, seed=0), loader(2, seed=1))


def watch(module: GPT) -> list[lightning.Callback]:
    """Every callback, with the heads of queries, keys and values as slices of their own."""
    size = WIDTH // HEADS
    heads = [(f"{part} head {h}", (HEADS * p + h) * size, (HEADS * p + h + 1) * size)
             for p, part in enumerate(("query", "key", "value")) for h in range(HEADS)]  # fmt: skip
    parity = GradientParity(
        twin_reference(module, GPT(), GPT.loss),
        slices={f"blocks.{layer}.qkv.weight": heads for layer in range(LAYERS)},
        every=5,
    )
    throughput = Throughput(label="bf16-mixed", counts=label_counts)
    return throughput.around([LossTracker(counts=label_counts), Finite(), GradientPresence(), parity])


def run(spoil: Callable[[GPT], Any] = lambda module: None) -> Verdict:
    """Train in float32 for the losses, then in bf16-mixed under watch. ``spoil`` may break the watched module."""
    torch.manual_seed(0)
    plain, module = GPT(), GPT()
    module.load_state_dict(plain.state_dict())
    spoil(module)
    float32 = LossTracker(counts=label_counts)
    train(plain, [float32], "32-true")
    callbacks = watch(module)
    train(module, callbacks, "bf16-mixed")
    return judge(
        callbacks,
        limits={
            "gradient_error_max": 0.03,
            "gradient_error_slice_max": 0.05,
            "gradient_error_median_max": 0.02,
            "loss_gap_max": 0.02,
        },
        reference_losses=[sample.loss for sample in float32.samples],
    )


def main() -> int:
    warnings.filterwarnings("ignore", module="lightning")  # advice about data loader workers
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    verdict = run()
    print(verdict)
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
