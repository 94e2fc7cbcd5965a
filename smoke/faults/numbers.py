"""Faults of single numbers and slices: wrong where a sum over the whole tensor does not show it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from smoke.config import PolicyConfig
from smoke.faults.fault import Fault, replaced


def last_step(trainer: Any) -> bool:
    """Whether the watched training is in its last step (so that no later step inherits the damage)."""
    return trainer.global_step == trainer.max_steps - 1


@contextlib.contextmanager
def nan_in_one_gradient() -> Iterator[None]:
    from smoke.module import SmokeModule

    def poison(module: Any) -> None:
        if last_step(module.trainer):
            module.model.layers[1].self_attention.linear_proj.weight.grad[3, 5] = float("nan")

    with replaced(SmokeModule, "on_after_backward", poison):
        yield


@contextlib.contextmanager
def nan_hidden_by_cast() -> Iterator[None]:
    """In the last step a NaN enters the quantized down-projections; the cast to E2M1 turns it into a number."""
    import torch

    from smoke.model.mla import MLASelfAttention
    from smoke.module import SmokeModule

    down, training_step = MLASelfAttention._down, SmokeModule.training_step
    live: list[bool] = []

    def poisoned(attention: Any, hidden_TH: Any) -> Any:
        if live:
            spoiled = torch.zeros_like(hidden_TH)
            spoiled[3, 5] = float("nan")
            hidden_TH = hidden_TH + spoiled
        return down(attention, hidden_TH)

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        if last_step(module.trainer):
            live.append(True)
        try:
            return training_step(module, batch, batch_idx)
        finally:
            live.clear()

    with replaced(MLASelfAttention, "_down", poisoned), replaced(SmokeModule, "training_step", step):
        yield


@contextlib.contextmanager
def shared_key_rows_wrong() -> Iterator[None]:
    """The gradient of the rows that make the one rotated key of all heads has the wrong sign, in the watched model."""
    from smoke.precision.plugin import EmulatedPrecision

    original = EmulatedPrecision.convert_module

    def with_wrong_rows(plugin: Any, module: Any) -> Any:
        if not plugin.plan:
            attention = module.model.layers[1].self_attention
            latent = attention.config.kv_lora_rank

            def turn(gradient: Any) -> Any:
                gradient = gradient.clone()
                gradient[latent:].neg_()
                return gradient

            attention.linear_kv_down_proj.weight.register_hook(turn)
        return original(plugin, module)

    with replaced(EmulatedPrecision, "convert_module", with_wrong_rows):
        yield


@contextlib.contextmanager
def weights_in_another_order() -> Iterator[None]:
    """The K and V rows of the combined weight are read as if all K rows came first."""
    from smoke.model.mla import MLASelfAttention

    def wrong_order(attention: Any) -> Any:
        nope, _, value, _ = attention._widths()
        rows = (attention.heads * nope, attention.heads * value)
        k_up, v_up = attention.linear_kv_up_proj.weight.split(rows)
        return k_up.unflatten(0, (attention.heads, -1)), v_up.unflatten(0, (attention.heads, -1))

    with replaced(MLASelfAttention, "kv_up_weights", wrong_order):
        yield


@contextlib.contextmanager
def masters_never_copied() -> Iterator[None]:
    import torch

    from smoke.module import MasterAdamW

    original = MasterAdamW.step

    def step(optimizer: Any, closure: Any = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        with torch.no_grad():
            before = [(parameter, parameter.clone()) for parameter, _ in optimizer.pairs()]
            original(optimizer)
            for parameter, kept in before:
                parameter.copy_(kept)
        return result

    with replaced(MasterAdamW, "step", step):
        yield


FAULTS = (
    Fault(
        name="nan-in-one-gradient",
        row=15,
        summary="one weight gradient holds a NaN while the loss stays finite",
        red=("finite",),
        may_follow=("accumulation_parity",),
        where="layers.1.self_attention.linear_proj.weight",
        changes={"precision": "mxfp8"},
        inject=nan_in_one_gradient,
    ),
    Fault(
        name="nan-hidden-by-cast",
        row=29,
        summary="a NaN enters NVFP4 leaves, whose cast turns it into 6: everything downstream is finite",
        red=("finite",),
        may_follow=("accumulation_parity",),
        where="input layers.0.self_attention.linear_q_down_proj",
        changes={"precision": "nvfp4", "policy": PolicyConfig(last_layers_bf16=0)},
        inject=nan_hidden_by_cast,
    ),
    Fault(
        name="shared-key-rows-wrong",
        row=23,
        summary="a gradient is right on the whole and wrong on the rows of the shared rotated key",
        red=("gradient_parity",),
        where="linear_kv_down_proj.weight[rope]",
        changes={"precision": "mxfp8"},
        inject=shared_key_rows_wrong,
    ),
    Fault(
        name="weights-in-another-order",
        row=26,
        summary="the absorbed products read K and V weights in another order than they are stored in",
        red=("absorbed_parity",),
        may_follow=("gradient_parity",),
        where="self_attention",
        changes={"precision": "mxfp8"},
        inject=weights_in_another_order,
    ),
    Fault(
        name="masters-never-copied",
        row=0,
        summary="the optimizer moves its float32 masters and never copies them into the parameters",
        red=("loss_tracking",),
        where="BF16 twin",
        changes={"precision": "mxfp8", "steps": 12},
        inject=masters_never_copied,
    ),
)
