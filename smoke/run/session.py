"""Builds what one run needs from a plan: data, model, precision plug-in, and the BF16 twin on the meta device.

The twin shares no state with the watched model: it is called with ``functional_call`` on detached aliases of the live
parameters (same storage, own gradients) and on clones of the buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call

from smoke.data.module import SmokeData
from smoke.data.sources import DataError
from smoke.model.attention import Sequences
from smoke.model.deepseek import DeepseekV3
from smoke.model.mla import MLASelfAttention
from smoke.model.mtp import next_labels
from smoke.model.recompute import InPlaceWrite, Recompute
from smoke.model.routing import RoutingTape, replay_routing
from smoke.module import IGNORED_LABEL, Batch, MasterAdamW, SmokeModule, make_optimizer, train_step
from smoke.plan import Plan
from smoke.precision.plugin import EmulatedPrecision
from smoke.precision.recipe import RECIPES


@dataclass
class Session:
    """The parts of one run, wired. ``batches`` are on the run's device; ``windows`` are those of each step."""

    plan: Plan
    data: SmokeData
    batches: list[Batch]
    module: SmokeModule
    precision: EmulatedPrecision
    recompute: Recompute
    twin: SmokeModule
    writes: list[InPlaceWrite]
    """Saved tensors that were written in place, since ``taken_writes`` was called."""

    @property
    def windows(self) -> list[list[Batch]]:
        return windows(self.plan, self.batches)

    @property
    def model(self) -> DeepseekV3:
        return self.module.model

    def taken_writes(self) -> list[InPlaceWrite]:
        """What is in ``writes``, which is empty afterwards."""
        taken = list(self.writes)
        self.writes.clear()
        return taken

    def attentions(self) -> dict[str, MLASelfAttention]:
        """Every attention module, by name."""
        return {name: module for name, module in self.model.named_modules() if isinstance(module, MLASelfAttention)}

    def optimizer(self) -> MasterAdamW:
        return make_optimizer(self.model, self.plan.config.train)

    def step(self, optimizer: MasterAdamW) -> Callable[[Sequence[Batch], Callable[[], None]], Tensor]:
        """One optimizer step of the watched module, in the form that trajectories take."""
        clip = self.plan.config.trainer.gradient_clip_val
        return lambda window, on_gradients: train_step(
            self.module, optimizer, window, self.precision.forward_context, on_gradients, clip=clip
        )

    def reference_gradients(self, batch: Batch, routing: RoutingTape | None) -> dict[str, Tensor]:
        """Gradients of the BF16 twin at the live weights, by parameter name of the model; routing replayed if given.

        Of a micro-batch they are those of its share of the step's loss, as many times larger (float64): a gradient of
        the undivided loss would be rounded elsewhere.
        """
        count = self.plan.config.trainer.accumulate_grad_batches
        aliases = {f"model.{name}": p.detach().requires_grad_() for name, p in self.model.named_parameters()}
        if count > 1:
            for alias in aliases.values():
                alias.grad_dtype = torch.float32  # as those of the module that accumulates
        twin_buffers = dict(self.twin.model.named_buffers())
        buffers = {f"model.{n}": b.detach().clone() for n, b in self.model.named_buffers() if n in twin_buffers}
        batch = {key: value.to(next(iter(aliases.values())).device) for key, value in batch.items()}
        with torch.enable_grad(), replay_routing(routing) if routing is not None else contextlib.nullcontext():
            loss = functional_call(self.twin, {**aliases, **buffers}, (batch,), strict=False)
        gradients = torch.autograd.grad(loss / count, list(aliases.values()), allow_unused=True)
        return {
            name.removeprefix("model."): gradient if count == 1 else gradient.double() * count
            for name, gradient in zip(aliases, gradients, strict=True)
            if gradient is not None
        }


def windows(plan: Plan, batches: list[Batch]) -> list[list[Batch]]:
    """The micro-batches of each optimizer step."""
    count = plan.config.trainer.accumulate_grad_batches
    return [batches[start : start + count] for start in range(0, len(batches), count)]


def load_data(plan: Plan, batches: list[Batch] | None = None) -> tuple[SmokeData, list[Batch]]:
    """The batches of the run, on its device: those given, or read and packed. Raises DataError."""
    config = plan.config
    data = SmokeData(
        config.data,
        layout=config.layout,
        seed=config.seed,
        steps=config.steps,
        vocab_size=config.model.vocab_size,
        accumulate=config.trainer.accumulate_grad_batches,
        batches=batches,
    )
    for number, batch in enumerate(data.batches()):
        _refuse_idle_attention(plan, number, batch)
    return data, [{k: v.to(plan.device) for k, v in batch.items()} for batch in data.batches()]


def _refuse_idle_attention(plan: Plan, number: int, batch: Batch) -> None:
    """A batch needs, for each head, a label behind a token that attends to another one.

    Without it the loss is 0/0, or queries get a gradient of zero, through no fault of the recipe. Only packs of very
    short sequences have none. The same goes for a batch of one token repeated: all values are alike.
    """
    config, positions_T = plan.config, batch["positions"].flatten()
    first = int(batch["tokens"].flatten()[0])
    if bool((batch["tokens"] == first).all()):
        raise DataError(
            f"--data.source {config.data.source}: every token of batch {number} is {first}, so attention has "
            "nothing to choose from; use real text, or --data.source generated"
        )
    labels_T = batch["labels"].flatten()
    labels = {"next-token": labels_T}
    if config.model.num_nextn_predict_layers:
        labels["multi-token-prediction"] = next_labels(labels_T, Sequences.of(batch, config.layout))
    for what, label_T in labels.items():
        if not bool(((label_T != IGNORED_LABEL) & (positions_T > 0)).any()):
            longest = int(positions_T.max()) + 1
            raise DataError(
                f"--data.source {config.data.source}: batch {number} has no {what} label except on first tokens, its "
                f"longest sequence has {longest} tokens; use longer texts, a larger --data.sequence_length or "
                "--data.micro_batch_size, or --layout sbhd"
            )


def make_model(plan: Plan, recompute: Recompute | None, *, seed: int | None, device: str | None = None) -> DeepseekV3:
    """A model of the plan's sizes; initialised from ``seed`` unless it is None (meta device)."""
    config = plan.config
    model = DeepseekV3(
        config.model,
        layout=config.layout,
        impl=plan.impl,
        recompute=recompute,
        expert_row_multiple=plan.recipe.expert_row_multiple,
        device=device or plan.device,
    )
    if seed is not None:
        model.init_weights(seed)
    return model


def bf16_plan(plan: Plan) -> Plan:
    """The plan of the BF16 twin: same model and data, no quantization and no recompute."""
    return replace(plan, config=replace(plan.config, precision="bf16", recompute=()), recipe=RECIPES["bf16"])


def make_module(plan: Plan, model: DeepseekV3) -> SmokeModule:
    config = plan.config
    return SmokeModule(
        model,
        config.train,
        mtp_loss_weight=config.model.mtp_loss_weight,
        accumulates=config.trainer.accumulate_grad_batches > 1,
    )


def build(plan: Plan, data: SmokeData, batches: list[Batch]) -> Session:
    """Assemble a session; the leaves are already swapped when it returns."""
    config = plan.config
    recompute = Recompute(config.recompute)
    module = make_module(plan, make_model(plan, recompute, seed=config.seed))
    twin = make_module(plan, make_model(bf16_plan(plan), None, seed=None, device="meta"))
    precision = EmulatedPrecision(plan.recipe, config.policy, num_layers=config.model.num_hidden_layers)
    precision.runtime.keeps_input = recompute.is_discarded
    recompute.context_fn = precision.runtime.recompute_contexts
    precision.convert_module(module)
    writes: list[InPlaceWrite] = []
    recompute.watch.report = writes.append
    return Session(plan, data, batches, module, precision, recompute, twin, writes)
