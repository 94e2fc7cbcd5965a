"""Operands on a CUDA device are those of the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from smoke.kernels.quantize.api import Scaling, amax, operand, random_bits_like
from smoke.kernels.quantize.known import known_answers, mismatches
from smoke.precision.recipe import RECIPES

SPECS = {
    f"{name}-{role}-{spec.format.name}": spec
    for name, recipe in RECIPES.items()
    for gradient in recipe.dy
    for role, spec in recipe.specs(gradient).items()
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_operands_are_those_of_the_cpu(name):
    spec = SPECS[name]
    g = torch.Generator().manual_seed(3)
    shape = (192, 352)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-30, 30, (192, 1), generator=g).float())
    x[::5] = 0
    special = x.clone()
    special[3, 4], special[5, 6], special[7, 8] = torch.inf, -torch.inf, torch.nan
    for source in (x.bfloat16(), (x * 2.0**-115).bfloat16(), special.bfloat16()):
        given = {"scale": torch.tensor(37.3)} if spec.scaling is Scaling.TENSOR_DELAYED else {}
        if spec.stochastic:
            given["random_bits"] = random_bits_like(source, g)
        for direction in ("row", "col"):
            cpu = operand(source, spec, direction, **given)
            cuda = operand(source.cuda(), spec, direction, **{k: v.cuda() for k, v in given.items()})
            nan = cpu.values.isnan()
            assert torch.equal(cuda.values.cpu().isnan(), nan)
            assert torch.equal(cuda.values.cpu().view(torch.int16)[~nan], cpu.values.view(torch.int16)[~nan])
            if cpu.factor is not None:
                assert cuda.factor.is_cuda
                torch.testing.assert_close(cuda.factor.cpu(), cpu.factor, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(amax(source.cuda()).cpu(), amax(source))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_known_answers(name):
    spec = SPECS[name]
    for known in known_answers(spec):
        assert mismatches(known, lambda x, d, **a: operand(x, spec, d, **a), device="cuda") == []


@pytest.mark.gpu
def test_random_bits_come_from_the_generator():
    x = torch.empty(33, 5, device="cuda")
    draws = [random_bits_like(x, torch.Generator("cuda").manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
