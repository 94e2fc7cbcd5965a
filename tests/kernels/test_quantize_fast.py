"""Fast operands are bit-equal to the definition, whatever the numbers, the shape, the strides and the number of calls.

The sign of a NaN is left out: the definition drops it, as the hardware does, and nothing downstream can see it.
"""

from __future__ import annotations

import pytest
import torch
from operands import both

from smoke.kernels.quantize import api, fast, reference
from smoke.kernels.quantize.api import Format, Operand, Scaling, Spec, amax, operand, quantize, random_bits_like
from smoke.precision.recipe import RECIPES

SPECS = {
    f"{name}-{role}-{spec.format.name}": spec
    for name, recipe in RECIPES.items()
    for gradient in recipe.dy
    for role, spec in recipe.specs(gradient).items()
} | {
    "tensorwise-pow2": Spec(Format.E4M3, Scaling.TENSOR_CURRENT, power_of_two=True),
    "nvfp4-plain": Spec(Format.E2M1, Scaling.NV_16),
    "blockwise-2d-E5M2": Spec(Format.E5M2, Scaling.BLOCK_2D_128, power_of_two=True),
}
SHAPES = [(32, 32), (64, 576), (160, 224), (1184, 160)]
PARTIAL = [(1, 1), (7, 300), (130, 5), (129, 257)]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def inputs(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    g = generator()
    normal = torch.randn(shape, generator=g)

    def exponents(low: int, high: int, size: tuple[int, int] = shape) -> torch.Tensor:
        return torch.exp2(torch.randint(low, high, size, generator=g).float())

    holes = normal.clone()
    holes[::3], holes[:, ::5], holes[-1] = 0, -0.0, holes[-1] * 2.0**-100
    special = normal.clone()
    special.view(-1)[:: max(1, special.numel() // 5)] = torch.inf
    special.view(-1)[-1] = -torch.inf
    poisoned = special.clone()
    poisoned[0, 0] = torch.nan
    bits = torch.randint(-(2**15), 2**15, shape, generator=g, dtype=torch.int16)
    found = {
        "normal": normal,
        "wide": normal * exponents(-20, 20),
        "very wide": normal * exponents(-126, 120),
        "wide by row": normal * exponents(-30, 30, (shape[0], 1)),
        "holes": holes,
        "zero": torch.zeros(shape),
        "negative zero": -torch.zeros(shape),
        "subnormal": normal * 2.0**-130,
        "small": normal * 2.0**-110,
        "largest": normal * 2.0**126,
        "inf": special,
        "inf and NaN": poisoned,
    }
    found = {name: x.bfloat16() for name, x in found.items()}
    found["any bits"] = bits.view(torch.bfloat16)
    found["transposed"] = normal.mT.contiguous().bfloat16().mT
    found["every other column"] = normal.repeat_interleave(2, 1).bfloat16()[:, ::2]
    return found


def arguments(spec: Spec, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {}
    if spec.scaling is Scaling.TENSOR_DELAYED:
        found["scale"] = torch.tensor(37.3)
    if spec.stochastic:
        found["random_bits"] = random_bits_like(x, generator())
    return found


def assert_same(ours: Operand, definition: Operand, label: str) -> None:
    nan = definition.values.isnan()
    assert torch.equal(ours.values.isnan(), nan), label
    assert torch.equal(ours.values.view(torch.int16)[~nan], definition.values.view(torch.int16)[~nan]), label
    if definition.factor is None:
        assert ours.factor is None, label
    else:
        assert ours.factor is not None
        assert ours.factor.dtype == definition.factor.dtype
        torch.testing.assert_close(ours.factor, definition.factor, rtol=0, atol=0, equal_nan=True, msg=label)


def by_definition(x: torch.Tensor, spec: Spec, direction, **given) -> Operand:
    return api._from_definition(quantize(x.contiguous(), spec, direction, **given))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("direction", ["row", "col"])
def test_bit_equal_to_the_definition(name, direction):
    spec = SPECS[name]
    takes_any = spec.scaling.per_tensor or spec.scaling.partial_blocks
    for shape in SHAPES + PARTIAL if takes_any else SHAPES:
        for label, x in inputs(shape).items():
            given = arguments(spec, x)
            before = x.clone()
            ours = operand(x, spec, direction, **given)
            assert ours.values.shape == x.shape
            assert ours.values.is_contiguous()
            assert_same(ours, by_definition(x, spec, direction, **given), f"{label} {shape}")
            assert torch.equal(before.view(torch.int16), x.view(torch.int16)), "the input was written to"


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.scaling.family in ("mx", "block")])
def test_block_values_are_exact_in_bf16(name):
    for label, x in inputs((64, 160)).items():
        exact = quantize(x, SPECS[name], "row").dequantize()
        values = operand(x, SPECS[name], "row").values.float()
        assert torch.equal(values.nan_to_num(), exact.nan_to_num()), label


@pytest.mark.parametrize("name", SPECS)
def test_more_elements_than_one_piece(name):
    spec = SPECS[name]
    x = (torch.randn(544, 2080, generator=generator()) * 3).bfloat16()
    assert x.numel() > fast.WHOLE
    given = arguments(spec, x)
    for direction in ("row", "col"):
        assert_same(operand(x, spec, direction, **given), by_definition(x, spec, direction, **given), direction)


@pytest.mark.parametrize("name", SPECS)
def test_everyday_numbers_take_the_fast_path(name, monkeypatch):
    """Gradients times 1e-6 with rows of zeros included: the definition must not be needed."""
    spec = SPECS[name]
    x = torch.randn(96, 64, generator=generator()) * 1e-6
    x[::4] = 0
    given = arguments(spec, x)
    monkeypatch.setattr(api, "quantize", lambda *_, **__: pytest.fail("the definition was used"))
    for direction in ("row", "col"):
        assert operand(x.bfloat16(), spec, direction, **given).values.isfinite().all()


@pytest.mark.parametrize("name", SPECS)
def test_no_rows(name):
    """An expert can get no token."""
    spec = SPECS[name]
    scale = torch.tensor(2.5) if spec.scaling is Scaling.TENSOR_DELAYED else None
    for found in both(torch.empty(0, 64, dtype=torch.bfloat16), spec, scale=scale, generator=generator()):
        assert found.values.shape == (0, 64)
        assert found.factor is None or found.factor.isfinite()


def test_amax_is_that_of_the_definition():
    for shape in SHAPES + PARTIAL:
        for label, x in inputs(shape).items():
            assert torch.equal(amax(x), reference.amax(x)), label
    assert amax(torch.empty(0, 3).bfloat16()) == 0
    assert amax(torch.full((3,), torch.nan).bfloat16()) == 0
    assert amax(torch.tensor([-3.0, 2.0]).bfloat16()).dtype is torch.float32


def test_gradients_do_not_flow():
    x = torch.randn(32, 32, generator=generator()).bfloat16().requires_grad_()
    assert not operand(x, SPECS["mxfp8-x-E4M3"], "row").values.requires_grad


def test_random_bits_come_from_the_generator_alone():
    x = torch.randn(48, 16, generator=generator()).bfloat16()
    spec = RECIPES["nvfp4"].specs()["dy"]
    first, again, other = (
        operand(x, spec, "row", generator=torch.Generator().manual_seed(seed)).values for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    counts = random_bits_like(torch.empty(256, 256), generator()).view(-1).bincount(minlength=256)
    assert counts.min() > 150  # 256 expected of each, standard deviation 16
