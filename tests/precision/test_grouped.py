"""Experts are multiplied together or one by one: the same bits, gradients and counts."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from smoke.config import PolicyConfig
from smoke.model.linear import GroupedLinear, Linear
from smoke.precision.plugin import EmulatedPrecision
from smoke.precision.recipe import RECIPES

EXPERTS, INPUTS, OUTPUTS = 5, 64, 96


def _converted(recipe: str, leaf: nn.Module) -> tuple[nn.Module, EmulatedPrecision]:
    plugin = EmulatedPrecision(RECIPES[recipe], PolicyConfig(last_layers_bf16=0), num_layers=1)
    holder = nn.ModuleDict({"leaf": leaf})
    plugin.convert_module(holder)
    return holder["leaf"], plugin


def _step(leaf, plugin, x, dy, *how):
    x = x.clone().requires_grad_()
    with plugin.runtime.autocast() if plugin.specs else contextlib.nullcontext():
        y = leaf(x, *how)
    y.backward(dy)
    return y.detach(), x.grad


def _stochastic(recipe: str) -> bool:
    return any(spec.stochastic for spec in RECIPES[recipe].specs("auto").values())


@pytest.mark.parametrize("rows", [[32, 0, 128, 64, 0], [160, 32, 32, 32, 32], [0, 0, 0, 0, 96]], ids=str)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if not _stochastic(name)])
def test_a_group_is_what_a_linear_of_its_own_computes(recipe, rows):
    g = torch.Generator().manual_seed(0)
    grouped = GroupedLinear(EXPERTS, INPUTS, OUTPUTS)
    for weight in grouped.parameters():
        nn.init.normal_(weight, std=0.05, generator=g)
    alone = [Linear(INPUTS, OUTPUTS) for _ in range(EXPERTS)]
    for linear, weight in zip(alone, grouped.weights(), strict=True):
        linear.weight.data.copy_(weight)
    x = torch.randn(sum(rows), INPUTS, generator=g).bfloat16()
    dy = torch.randn(sum(rows), OUTPUTS, generator=g).bfloat16() * 1e-3
    leaf, plugin = _converted(recipe, grouped)
    y, dx = _step(leaf, plugin, x, dy, rows)
    start = 0
    for group, count in enumerate(rows):
        weight = getattr(leaf, f"weight{group}")
        if count == 0:
            assert weight.grad is None
            continue
        part = slice(start, start + count)
        single, its_plugin = _converted(recipe, alone[group])
        y_alone, dx_alone = _step(single, its_plugin, x[part], dy[part])
        assert torch.equal(y[part], y_alone)
        assert torch.equal(dx[part], dx_alone)
        assert torch.equal(weight.grad, single.weight.grad)
        start += count
    used = sum(count > 0 for count in rows)
    if plugin.specs:
        assert plugin.runtime.calls == {
            ("leaf", "output", "forward"): used,
            ("leaf", "grad_input", "backward"): used,
            ("leaf", "grad_weight", "backward"): used,
        }


@pytest.mark.parametrize("recipe", ["bf16", "fp8-tensorwise", "fp8-delayed"])
def test_groups_of_any_number_of_rows(recipe):
    g = torch.Generator().manual_seed(1)
    grouped = GroupedLinear(3, 16, 16)
    for weight in grouped.parameters():
        nn.init.normal_(weight, std=0.05, generator=g)
    x, rows = torch.randn(12, 16, generator=g).bfloat16(), [1, 11, 0]
    leaf, plugin = _converted(recipe, grouped)
    y, dx = _step(leaf, plugin, x, torch.ones(12, 16).bfloat16(), rows)
    want = torch.cat([x[:1].float() @ leaf.weight0.float().T, x[1:].float() @ leaf.weight1.float().T])
    assert (y.float() - want).norm() < 0.1 * want.norm()
    assert dx.isfinite().all()
    assert leaf.weight2.grad is None


def test_no_rows_at_all():
    leaf = GroupedLinear(2, 16, 8)
    assert leaf(torch.empty(0, 16, dtype=torch.bfloat16), [0, 0]).shape == (0, 8)
