"""MasterAdamW: AdamW on float32 masters, to the last bit, and its state."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from smoke.config import TrainConfig
from smoke.module import MasterAdamW, make_optimizer

TRAIN = TrainConfig(learning_rate=3e-3, weight_decay=0.2)
OPTIONS: dict[str, Any] = {"lr": 3e-3, "betas": (TRAIN.adam_beta1, TRAIN.adam_beta2), "eps": TRAIN.adam_eps}
SHAPES = ((5, 7), (7,), (3, 2, 4))


def _parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def _holder(parameters: list[nn.Parameter]) -> nn.Module:
    return nn.ParameterList(parameters)


def _give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """torch's own, with the same groups: decay on matrices only."""
    matrices, vectors = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, fused=True, **OPTIONS)


def _steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        _give_gradients(parameters, step)
        optimizer.step()
        optimizer.zero_grad()


def _equal(left: list, right: list) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_on_float32_parameters_it_is_adamw_to_the_last_bit():
    mine, theirs, start = _parameters(torch.float32), _parameters(torch.float32), _parameters(torch.float32)
    _steps(make_optimizer(_holder(mine), TRAIN), mine, range(5))
    _steps(_adamw(theirs), theirs, range(5))
    assert _equal(mine, theirs)
    assert not any(torch.equal(a, b) for a, b in zip(mine, start, strict=True))


def test_bf16_parameters_are_the_rounded_masters():
    """The masters follow AdamW on float32 copies with the BF16 gradients; BF16 parameters alone would stand still."""
    mine, theirs = _parameters(torch.bfloat16), [nn.Parameter(p.detach().float()) for p in _parameters(torch.bfloat16)]
    optimizer, reference = make_optimizer(_holder(mine), TRAIN), _adamw(theirs)
    for step in range(5):
        _give_gradients(mine, step)
        for a, b in zip(mine, theirs, strict=True):
            b.grad = a.grad.float()
        optimizer.step()
        reference.step()
    masters = {id(parameter): master for parameter, master in optimizer.pairs()}
    assert _equal([masters[id(p)] for p in mine], theirs)
    assert _equal(mine, [p.detach().bfloat16() for p in theirs])
    assert all(master.grad is None for master in masters.values())
    assert not _equal([p.detach().float() for p in mine], theirs)


def test_a_parameter_without_gradient_stays():
    mine = _parameters(torch.bfloat16)
    optimizer = make_optimizer(_holder(mine), TRAIN)
    _give_gradients(mine, 0)
    mine[0].grad = None
    before = [p.detach().clone() for p in mine]
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(mine, before, strict=True)] == [True, False, False]


def test_state_goes_through_a_file_to_the_last_bit():
    whole, first = _parameters(torch.bfloat16), _parameters(torch.bfloat16)
    _steps(make_optimizer(_holder(whole), TRAIN), whole, range(6))
    optimizer = make_optimizer(_holder(first), TRAIN)
    _steps(optimizer, first, range(3))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "parameters": [p.detach() for p in first]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = [nn.Parameter(value) for value in saved["parameters"]]
    resumed = make_optimizer(_holder(second), TRAIN)
    resumed.load_state_dict(saved["optimizer"])
    assert _equal([m for _, m in resumed.pairs()], [m for _, m in optimizer.pairs()])
    assert any(not torch.equal(p.detach().float(), m) for p, m in resumed.pairs())
    _steps(resumed, second, range(3, 6))
    assert _equal(second, whole)


def test_a_saved_state_does_not_follow_the_optimizer():
    mine = _parameters(torch.bfloat16)
    optimizer = make_optimizer(_holder(mine), TRAIN)
    _steps(optimizer, mine, range(1))
    saved = optimizer.state_dict()
    masters = [m.clone() for m in saved["masters"]]
    _steps(optimizer, mine, range(1, 2))
    assert _equal(saved["masters"], masters)
    assert not _equal([m for _, m in optimizer.pairs()], masters)


def test_a_changed_learning_rate_counts():
    """What a scheduler does: it writes into the optimizer's groups."""
    mine, theirs = _parameters(torch.float32), _parameters(torch.float32)
    optimizer, reference = make_optimizer(_holder(mine), TRAIN), _adamw(theirs)
    for step, rate in enumerate((1e-2, 1e-4)):
        for either, parameters in ((optimizer, mine), (reference, theirs)):
            for group in either.param_groups:
                group["lr"] = rate
            _steps(either, parameters, range(step, step + 1))
    assert _equal(mine, theirs)


def test_the_closure_is_run_with_gradients_and_its_value_returned():
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = MasterAdamW([{"params": [parameter]}], weight_decay=0.0, **OPTIONS)

    def closure():
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 6.0
    assert parameter.detach().flatten().tolist() == pytest.approx([1 - OPTIONS["lr"]] * 6)
