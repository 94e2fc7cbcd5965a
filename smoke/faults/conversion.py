"""Faults of the conversion: leaves quantized, or not, or in another way than the recipe says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from smoke.config import PolicyConfig
from smoke.faults.fault import SMALL, Fault, replaced


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


@contextlib.contextmanager
def floored_block_scale() -> Iterator[None]:
    """MX block scales are rounded down, so the largest elements of a block saturate. Through the definition alone."""
    import torch

    from smoke.kernels.quantize import fast, reference

    up = reference.e8m0_up

    def down(quotient: Any) -> Any:
        floor = (torch.frexp(quotient).exponent - 1 + 127).clamp(0, 254)
        return torch.where(quotient > 0, floor.to(up(quotient).dtype), up(quotient))

    with replaced(fast, "power_of_two_blocks", lambda *args: None), replaced(reference, "e8m0_up", down):
        yield


@contextlib.contextmanager
def division_by_zero() -> Iterator[None]:
    """The scale of a block of zeros is largest / 0. Only of E4M3, for output gradients do have rows of zeros."""
    from smoke.kernels.quantize import fast, reference
    from smoke.kernels.quantize.spec import Format

    original = reference.current_scale

    def unguarded(amax: Any, spec: Any, **kwargs: Any) -> Any:
        scale = original(amax, spec, **kwargs)
        return scale.masked_fill(amax == 0, float("inf")) if spec.format is Format.E4M3 else scale

    with replaced(fast, "power_of_two_blocks", lambda *args: None), replaced(reference, "current_scale", unguarded):
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
        may_follow=("gradient_presence", "dtype_ledger"),
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
    Fault(
        name="floored-block-scale",
        row=13,
        summary="block scales are rounded down instead of up under MXFP8: the largest elements saturate",
        red=("quantizer",),
        may_follow=("gradient_parity",),
        where="just above the largest number",
        changes={"precision": "mxfp8"},
        inject=floored_block_scale,
    ),
    Fault(
        name="row-of-zeros",
        row=17,
        summary="a block of zeros (padding) is divided by its amax; this run meets none, the known answers do",
        red=("quantizer",),
        may_follow=("finite",),
        where="the recipe",
        changes={
            "precision": "fp8-blockwise",
            "policy": PolicyConfig(gradient_format="e5m2"),
            "model": dataclasses.replace(SMALL, first_k_dense_replace=2, num_nextn_predict_layers=0),
        },
        inject=division_by_zero,
    ),
)
