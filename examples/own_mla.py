"""Your own latent attention with your own FP8 layers: did they run, and do their gradients keep near BF16's?

    python examples/own_mla.py

Three things are told to smoke, and nothing else: a twin without the FP8 layers (the same class with another
``linear``), the rows of each head (so that one wrong head shows), and a counter that the FP8 layer calls when it
multiplies. Limits are those of the recipe fp8-tensorwise: E4M3 operands, E5M2 output gradients, a scale for each
tensor.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from smoke.callbacks import (
    Coverage,
    Finite,
    GemmCounter,
    GradientParity,
    GradientPresence,
    LossTracker,
    Throughput,
    twin_reference,
)
from smoke.verdict import Verdict, judge

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 64, 64, 4, 2, 32
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 32, 32, 16, 16, 16
STEPS = 12
Batch = dict[str, Tensor]


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as FP8 of that type can hold it, with one scale for the tensor; float32 in and out."""
    scale = torch.finfo(dtype).max / x.abs().max().clamp(min=1e-12)
    return (x * scale).to(dtype).float() / scale


class Fp8Product(torch.autograd.Function):
    """y = x w^T and its two gradients, every operand in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, name: str, counter: GemmCounter) -> Tensor:
        x, w = rounded(x, torch.float8_e4m3fn), rounded(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        ctx.name, ctx.counter = name, counter
        counter.count(name, "output", quantized=True)
        return x @ w.mT

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, w = ctx.saved_tensors
        dy = rounded(dy, torch.float8_e5m2)
        for gemm in ("grad_input", "grad_weight"):
            ctx.counter.count(ctx.name, gemm, quantized=True)
        return dy @ w, dy.flatten(0, -2).mT @ x.flatten(0, -2), None, None


class Fp8Linear(nn.Linear):
    """A linear layer with FP8 products; ``name`` and ``counter`` are set when the model is complete."""

    name: str
    counter: GemmCounter

    def forward(self, x: Tensor) -> Tensor:
        return Fp8Product.apply(x, self.weight, self.name, self.counter)


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, length, ROPE], halves rotated against each other."""
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** -torch.linspace(0, 1, ROPE // 2)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


class Attention(nn.Module):
    """Multi-head latent attention: queries and keys through low ranks, one rotated key that all heads share."""

    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.q_down = linear(WIDTH, Q_RANK, bias=False)
        self.q_up = linear(Q_RANK, HEADS * (NOPE + ROPE), bias=False)
        self.kv_down = linear(WIDTH, KV_RANK + ROPE, bias=False)
        self.kv_up = linear(KV_RANK, HEADS * (NOPE + VALUE), bias=False)
        self.out = linear(HEADS * VALUE, WIDTH, bias=False)
        self.norm, self.q_norm, self.kv_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(Q_RANK), nn.RMSNorm(KV_RANK)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, length, width] -> the same shape."""
        hidden = self.norm(x)
        query = self.q_up(self.q_norm(self.q_down(hidden))).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        latent, key_rope = self.kv_down(hidden).split([KV_RANK, ROPE], dim=-1)
        key_value = self.kv_up(self.kv_norm(latent)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = key_value.split([NOPE, VALUE], dim=-1)
        query = torch.cat([query[..., :NOPE], rotated(query[..., NOPE:])], dim=-1)
        key = torch.cat([key, rotated(key_rope[:, None]).expand(-1, HEADS, -1, -1)], dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(lightning.LightningModule):
    """Embedding, attention layers, head. ``linear`` makes every layer but the head."""

    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(Attention(linear) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def loss(self, batch: Batch) -> Tensor:
        logits = self.head(self.layers(self.embedding(batch["tokens"])))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def count_products(model: Model) -> GemmCounter:
    """Plan and count every product: FP8 in the layers, the head as it is."""
    counter = GemmCounter()
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            module.name, module.counter = name, counter
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            counter.plan(name, "e4m3 x e4m3")
    counter.plan("head", None, "the output head stays in high precision")
    model.head.register_forward_hook(lambda *_: counter.count("head", "output", quantized=False))
    return counter


def slices() -> dict[str, list[tuple[str, int, int]]]:
    """Rows of each head, and the rows that all heads share."""
    query = [(f"head {h}", h * (NOPE + ROPE), (h + 1) * (NOPE + ROPE)) for h in range(HEADS)]
    key_value = [(f"head {h}", h * (NOPE + VALUE), (h + 1) * (NOPE + VALUE)) for h in range(HEADS)]
    shared = [("latent", 0, KV_RANK), ("rope", KV_RANK, KV_RANK + ROPE)]
    parts = {"q_up": query, "kv_up": key_value, "kv_down": shared}
    return {f"layers.{layer}.{name}.weight": rows for layer in range(LAYERS) for name, rows in parts.items()}


def loader() -> DataLoader:
    """Sequences that count upwards by a step of their own; the last label of each is ignored."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        start, step = torch.randint(VOCABULARY, (2, 8, 1), generator=generator)
        tokens = (start + (1 + step % 3) * torch.arange(LENGTH)) % VOCABULARY
        labels = tokens.roll(-1, 1)
        labels[:, -1] = -100
        batches.append({"tokens": tokens, "labels": labels})
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list will do


def run(linear: type[nn.Linear] = Fp8Linear, spoil: Callable[[Model], Any] = lambda model: None) -> Verdict:
    """Train under watch and judge. Another ``linear``, or ``spoil``, may break what is watched."""
    torch.manual_seed(0)
    model = Model(linear)
    counter = count_products(model)
    spoil(model)
    with torch.device("meta"):  # the twin is called with the model's weights, it needs none of its own
        twin = Model(nn.Linear)
    parity = GradientParity(
        twin_reference(model, twin, Model.loss),
        slices=slices(),
        quantized=lambda parameter: parameter.split(".")[0] == "layers" and "norm" not in parameter,
        every=4,
    )
    throughput = Throughput(label="emulation")
    callbacks = throughput.around([LossTracker(), Finite(), GradientPresence(), parity, Coverage(counter.rows)])
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader())
    return judge(callbacks, precision="fp8-tensorwise")


def main() -> int:
    warnings.filterwarnings("ignore", module="lightning")  # advice about data loader workers
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    verdict = run()
    print(verdict)
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
