"""Lightning's precision seam: swap the leaves, open the autocast around every forward, report one row per GEMM.

``convert_module`` replaces leaves in place (same Parameter objects, same names) and can be called twice. Parameters
stay BF16 and no torch.autocast is opened. The bf16 recipe converts nothing and still reports its rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import lightning.pytorch.plugins as plugins
from torch import nn

from smoke.config import PolicyConfig
from smoke.kernels.quantize.spec import FORMAT_MAX, Scaling, Spec
from smoke.model.linear import GroupedLinear, HeadwiseLinear, Linear
from smoke.precision.delayed import DelayedState
from smoke.precision.emulated import (
    GEMMS,
    QuantizedGroupedLinear,
    QuantizedHeadwiseLinear,
    QuantizedLinear,
    Quantizers,
    Runtime,
)
from smoke.precision.policy import LeafPlan, plan_leaves
from smoke.precision.recipe import Recipe
from smoke.record import CoverageRow

Leaf = Linear | GroupedLinear | HeadwiseLinear
CONVERTED = (QuantizedLinear, QuantizedGroupedLinear, QuantizedHeadwiseLinear)


def leaves_of(model: nn.Module) -> dict[str, Leaf]:
    """Every leaf of the model by module name, in module order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, (Linear, GroupedLinear, HeadwiseLinear))}


def _uncalled(leaves: Mapping[str, Leaf]) -> list[str]:
    """Up-projections of absorbed attention: their Parameters are used by the per-head products, they never run."""
    absorbed = {name.rpartition(".")[0] for name in leaves if name.endswith(".k_up_absorbed")}
    kv_up = ("linear_kv_up_proj", "linear_k_up_proj", "linear_v_up_proj")
    return [n for n in leaves if n.rpartition(".")[0] in absorbed and n.rpartition(".")[2] in kv_up]


def live_specs(model: nn.Module) -> dict[tuple[str, Spec], str]:
    """(role, spec) of every quantizer that a converted leaf holds, with the first module that holds it."""
    found: dict[tuple[str, Spec], str] = {}
    for name, leaf in leaves_of(model).items():
        if isinstance(leaf, CONVERTED):
            for quantizers in leaf.quantizers if isinstance(leaf.quantizers, list) else [leaf.quantizers]:
                for role in ("x", "w", "dy"):
                    found.setdefault((role, getattr(quantizers, role)), name)
    return found


def state_slices(model: nn.Module) -> dict[str, list[tuple[str, int, int]]]:
    """Rows of the delayed-scaling buffers, by buffer name: which operand of which leaf each row belongs to."""
    forward: list[tuple[str, int, int]] = []
    backward: list[tuple[str, int, int]] = []
    for name, leaf in leaves_of(model).items():
        if isinstance(leaf, CONVERTED):
            for one in leaf.quantizers if isinstance(leaf.quantizers, list) else [leaf.quantizers]:
                rows = ((forward, "x", 2 * one.slot), (forward, "w", 2 * one.slot + 1), (backward, "dy", one.slot))
                for found, role, row in rows:
                    found.append((f"{role} of {name}", row, row + 1))
    states = (("quantizer_forward", forward), ("quantizer_backward", backward))
    return {f"{state}.{buffer}": rows for state, rows in states for buffer in ("amax_history", "scale")}


class EmulatedPrecision(plugins.Precision):
    """Precision plug-in of the emulation backend (and of plain bf16).

    Args:
        recipe: row of the recipe table.
        policy: layer policy.
        num_layers: decoder layers, for the first/last rules.
    """

    def __init__(self, recipe: Recipe, policy: PolicyConfig, *, num_layers: int):
        self.recipe, self.policy, self.num_layers = recipe, policy, num_layers
        self.runtime = Runtime()
        self.plan: dict[str, LeafPlan] = {}
        self.specs: dict[str, Spec] = recipe.specs(policy.gradient_format)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Swap the planned leaves of ``module`` (a LightningModule with ``.model``, or the model itself)."""
        inner = getattr(module, "model", None)
        model = inner if isinstance(inner, nn.Module) else module
        leaves = leaves_of(model)
        if self.plan or any(isinstance(leaf, CONVERTED) for leaf in leaves.values()):
            return module
        self.plan = plan_leaves(
            {name: isinstance(leaf, HeadwiseLinear) for name, leaf in leaves.items()},
            self.policy,
            quantizes=bool(self.specs),
            last_share=self.recipe.last_layers_bf16_share,
            num_layers=self.num_layers,
        )
        for name in _uncalled(leaves):
            self.plan[name] = LeafPlan(False, "never called: the absorbed products read its weight")
        chosen = {name: leaf for name, leaf in leaves.items() if self.plan[name].quantized}
        self._add_delayed_state(module, sum(_groups(leaf) for leaf in chosen.values()))
        for name, leaf in leaves.items():
            if name not in chosen:
                leaf.register_forward_pre_hook(self._count_bf16(name))
        slot = 0
        for name, leaf in chosen.items():
            parent_name, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent_name), attribute, self._convert(name, leaf, slot))
            slot += _groups(leaf)
        return module

    def _add_delayed_state(self, module: nn.Module, slots: int) -> None:
        if not slots or self.specs["x"].scaling is not Scaling.TENSOR_DELAYED:
            return
        state = partial(
            DelayedState,
            history_length=self.policy.amax_history_len,
            algorithm=self.policy.amax_compute_algo,
            margin=self.policy.margin,
            device=next(module.parameters()).device,
        )
        forward_max = [FORMAT_MAX[self.specs[role].format] for _ in range(slots) for role in ("x", "w")]
        self.runtime.forward_state = state(forward_max)
        self.runtime.backward_state = state([FORMAT_MAX[self.specs["dy"].format]] * slots)
        module.add_module("quantizer_forward", self.runtime.forward_state)
        module.add_module("quantizer_backward", self.runtime.backward_state)

    def _count_bf16(self, name: str) -> Callable[..., None]:
        """Hook of a leaf that stays as it is: its output GEMM runs in BF16 (the router's in float32)."""

        def count(leaf: nn.Module, args: object) -> None:
            self.runtime.count(name, "output", quantized=False)

        return count

    def _convert(self, name: str, leaf: Leaf, slot: int) -> nn.Module:
        quantizers = [Quantizers(self.runtime, name, **self.specs, slot=slot + group) for group in range(_groups(leaf))]
        if isinstance(leaf, Linear):
            return QuantizedLinear(leaf, quantizers[0])
        if isinstance(leaf, GroupedLinear):
            return QuantizedGroupedLinear(leaf, quantizers)
        return QuantizedHeadwiseLinear(leaf, quantizers)

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """The context of every forward; Lightning's step contexts all open this one."""
        with self.runtime.autocast():
            yield

    def coverage(self) -> list[CoverageRow]:
        """One row for every GEMM of every leaf, with the calls counted since the start."""
        return list(coverage_rows(self.plan, self.specs, self.runtime.calls))


def _groups(leaf: Leaf) -> int:
    if isinstance(leaf, GroupedLinear):
        return leaf.num_groups
    return leaf.num_heads if isinstance(leaf, HeadwiseLinear) else 1


def coverage_rows(
    plan: Mapping[str, LeafPlan], specs: Mapping[str, Spec], calls: Mapping[tuple[str, str, str], int]
) -> Iterator[CoverageRow]:
    """Join what was planned with what ran."""
    operands = {"output": ("x", "w"), "grad_input": ("dy", "w"), "grad_weight": ("dy", "x")}
    for module, leaf in plan.items():
        for gemm in GEMMS:
            first = "forward" if gemm == "output" else "backward"
            formats = (
                " x ".join(specs[role].format.name.lower() for role in operands[gemm]) if leaf.quantized else "bf16"
            )
            yield CoverageRow(
                module=module,
                gemm=gemm,
                format=formats,
                planned=leaf.quantized,
                reason=leaf.reason,
                quantized_calls=calls.get((module, gemm, first), 0),
                bf16_calls=calls.get((module, gemm, f"bf16-{first}"), 0),
                replay_quantized_calls=calls.get((module, gemm, "replay"), 0),
                replay_bf16_calls=calls.get((module, gemm, "bf16-replay"), 0),
            )
