"""The weight operands that the emulation multiplied, each beside a fresh quantization of the live Parameter.

A backend may keep quantized weights from one step to the next; the weight_freshness check asks whether what it
multiplied is what it would make now. Whoever can answer has the three methods of ``MultipliedWeights``: ``modules``,
``watch`` and ``take``. This one answers for the emulation, by looking at the operands as they enter the product: a
cache put anywhere between Parameter and product shows. The fresh operand is made here, group by group, by the quantizer
itself, from the Parameter that the module registers (not from the one the leaf holds), with the scale of that call.

Operands of the watched leaves are held until they are taken; watch a few leaves at a time.

Shape letters: P rows of all groups of a call, K columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from smoke.kernels.quantize.api import operand
from smoke.kernels.quantize.spec import Direction
from smoke.model.linear import GroupedLinear, HeadwiseLinear
from smoke.model.mla import MLASelfAttention
from smoke.precision.emulated import Quantizers, Runtime, Scales, _Operands
from smoke.precision.plugin import CONVERTED, leaves_of

ABSORBED = {"k_up_absorbed": 0, "v_up_absorbed": 1}
"""Per-head leaves, and which of the attention's two up-projections is their weight."""


class WeightPair(NamedTuple):
    """One weight operand: what was multiplied, and what the live Parameter gives now; BF16 values and a factor."""

    module: str
    parameter: str
    """Name of the weight inside the module: ``weight``, ``weight3`` of an expert, ``head 3`` of a per-head product."""
    direction: Direction
    """row in the output GEMM, col in grad_input."""
    used: tuple[Tensor, ...]
    fresh: tuple[Tensor, ...]


class MultipliedWeights:
    """Notes what the leaves of ``model`` multiply; ``model`` has its leaves swapped already."""

    def __init__(self, runtime: Runtime, model: nn.Module):
        self._model = model
        self._leaves = {name: leaf for name, leaf in leaves_of(model).items() if isinstance(leaf, CONVERTED)}
        self._watched: frozenset[str] = frozenset()
        self._seen: list[tuple[Sequence[Quantizers], Direction, _Operands, Scales]] = []
        runtime.show_weights = self._note

    def modules(self) -> list[str]:
        """Leaves whose weights are quantized, in module order."""
        return list(self._leaves)

    def watch(self, modules: Collection[str]) -> None:
        """From now on note the operands of these leaves, and of no others."""
        self._watched, self._seen = frozenset(modules), []

    def take(self) -> Iterator[WeightPair]:
        """The operands noted since ``watch`` or the last ``take``, in the order of their calls."""
        seen, self._seen = self._seen, []
        for quantizers, direction, used, scales in seen:
            values = used.values.split(used.values.shape[0] // len(quantizers))
            for q, value, factor, scale in zip(quantizers, values, used.factors, scales, strict=True):
                parameter, weight_OI = self._live(q)
                fresh = operand(weight_OI, q.w, direction, scale=scale)
                yield WeightPair(q.module, parameter, direction, _present(value, factor), _present(*fresh))

    def _note(self, quantizers: Sequence[Quantizers], direction: Direction, used: _Operands, scales: Scales) -> None:
        if quantizers[0].module in self._watched:
            self._seen.append((quantizers, direction, used, scales))

    def _live(self, q: Quantizers) -> tuple[str, Tensor]:
        """Name and present value of the weight [O, I] that belongs to a quantizer."""
        leaf = self._leaves[q.module]
        group = q.slot - (leaf.quantizers[0] if isinstance(leaf.quantizers, list) else leaf.quantizers).slot
        parent, _, attribute = q.module.rpartition(".")
        if isinstance(leaf, HeadwiseLinear):
            attention = self._model.get_submodule(parent)
            assert isinstance(attention, MLASelfAttention)
            weight_NOI = attention.kv_up_weights()[ABSORBED[attribute]]
            return f"head {group}", (weight_NOI.mT if attribute == "k_up_absorbed" else weight_NOI)[group]
        parameter = f"weight{group}" if isinstance(leaf, GroupedLinear) else "weight"
        return parameter, self._model.get_parameter(f"{q.module}.{parameter}")


def _present(values: Tensor, factor: Tensor | None) -> tuple[Tensor, ...]:
    return (values,) if factor is None else (values, factor)
