"""Which leaves a recipe quantizes, and why not the others: the layer policy, one visible row for each leaf.

Following Megatron-core, the output head, the router and the embedding stay in high precision, and so do the absorbed
per-head K-up and V-up products unless asked otherwise. NVFP4 also keeps the last layers in BF16 (arXiv:2509.25149).
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from smoke.config import PolicyConfig

HIGH_PRECISION = {"output_layer": "the output head stays in BF16", "router": "the router stays in float32"}
ABSORBED = ("k_up_absorbed", "v_up_absorbed")


class PolicyError(ValueError):
    """A pattern of the policy matches no GEMM."""


@dataclass(frozen=True)
class LeafPlan:
    """Whether a leaf's GEMMs are quantized, and the reason."""

    quantized: bool
    reason: str


def last_layers(policy: PolicyConfig, share: float, num_layers: int) -> int:
    """Decoder layers kept in BF16 at the end: the policy's number, or the recipe's share of them (at least one)."""
    if policy.last_layers_bf16 is not None:
        return policy.last_layers_bf16
    return math.ceil(share * num_layers) if share else 0


def plan_leaves(
    leaves: Mapping[str, bool], policy: PolicyConfig, *, quantizes: bool, last_share: float, num_layers: int
) -> dict[str, LeafPlan]:
    """Decide every leaf. ``leaves`` maps module names to whether the leaf is a per-head (absorbed) product.

    Raises:
        PolicyError: a ``keep_bf16`` pattern matches no leaf.
    """
    for pattern in policy.keep_bf16:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in leaves):
            raise PolicyError(
                f"--policy.keep_bf16 {pattern!r} matches no GEMM; the first ones are {', '.join(list(leaves)[:4])}"
            )
    last = last_layers(policy, last_share, num_layers)
    return {
        name: _plan_leaf(name, absorbed, policy, quantizes, range(policy.first_layers_bf16, num_layers - last), last)
        for name, absorbed in leaves.items()
    }


def _plan_leaf(name: str, absorbed: bool, policy: PolicyConfig, quantizes: bool, layers: range, last: int) -> LeafPlan:
    if not quantizes:
        return LeafPlan(False, "the recipe is bf16")
    for part, reason in HIGH_PRECISION.items():
        if part in name.split("."):
            return LeafPlan(False, reason)
    for pattern in policy.keep_bf16:
        if fnmatch.fnmatchcase(name, pattern):
            return LeafPlan(False, f"--policy.keep_bf16 {pattern}")
    if absorbed and policy.absorbed_kv == "bf16":
        return LeafPlan(False, "--policy.absorbed_kv bf16, as in Megatron-core")
    match = re.match(r"layers\.(\d+)\.", name)
    if match and int(match[1]) not in layers:
        return LeafPlan(False, "first or last layers are kept in BF16")
    if name.startswith("mtp") and last:
        return LeafPlan(False, "the prediction module follows the last layers, kept in BF16")
    return LeafPlan(True, "the recipe quantizes it")
