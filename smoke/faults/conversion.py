"""Faults of the conversion: leaves that should be quantized and are not, or the reverse."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from smoke.faults.fault import Fault, replaced


@contextlib.contextmanager
def nothing_converted() -> Iterator[None]:
    from smoke.precision.plugin import EmulatedPrecision

    with replaced(EmulatedPrecision, "_convert", lambda plugin, name, leaf, slot: leaf):
        yield


@contextlib.contextmanager
def output_head_quantized() -> Iterator[None]:
    from smoke.precision import plugin
    from smoke.precision.policy import LeafPlan

    original = plugin.plan_leaves

    def with_head(*args: Any, **kwargs: Any) -> dict[str, LeafPlan]:
        return {**original(*args, **kwargs), "output_layer": LeafPlan(True, "the recipe quantizes it")}

    with replaced(plugin, "plan_leaves", with_head):
        yield


@contextlib.contextmanager
def experts_left_out() -> Iterator[None]:
    import torch

    from smoke.model.moe import MoELayer

    def shared_experts_only(layer: Any, x_TH: Any, sequences: Any) -> Any:
        return layer.shared_experts(x_TH), x_TH.new_zeros((), dtype=torch.float32)

    with replaced(MoELayer, "forward", shared_experts_only):
        yield


@contextlib.contextmanager
def e5m2_gradients() -> Iterator[None]:
    from smoke.kernels.quantize.spec import Format
    from smoke.precision.plugin import EmulatedPrecision

    original = EmulatedPrecision.__init__

    def wrong_format(plugin: Any, *args: Any, **kwargs: Any) -> None:
        original(plugin, *args, **kwargs)
        plugin.specs = {**plugin.specs, "dy": dataclasses.replace(plugin.specs["dy"], format=Format.E5M2)}

    with replaced(EmulatedPrecision, "__init__", wrong_format):
        yield


FAULTS = (
    Fault(
        name="nothing-converted",
        row=11,
        summary="the conversion to quantized layers matched nothing: a BF16 run that passes for MXFP8",
        red=("coverage", "quantization_engaged"),
        may_follow=("gradient_parity", "loss_tracking", "weight_freshness"),
        where="linear",
        changes={"precision": "mxfp8"},
        inject=nothing_converted,
    ),
    Fault(
        name="output-head-quantized",
        row=12,
        summary="the output head is quantized by accident",
        red=("coverage",),
        where="output_layer",
        changes={"precision": "mxfp8"},
        inject=output_head_quantized,
    ),
    Fault(
        name="experts-left-out",
        row=0,
        summary="the routed experts and their router never run",
        red=("coverage",),
        may_follow=("gradient_presence",),
        where="experts",
        changes={"precision": "bf16", "recompute": ()},
        inject=experts_left_out,
    ),
    Fault(
        name="e5m2-gradients",
        row=13,
        summary="output gradients are E5M2 under MXFP8",
        red=("quantizer",),
        may_follow=("gradient_parity",),
        where="dy",
        changes={"precision": "mxfp8"},
        inject=e5m2_gradients,
    ),
)
