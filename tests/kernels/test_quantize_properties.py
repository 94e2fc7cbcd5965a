"""Properties of the recipes, as they really hold, over any BF16 numbers that Hypothesis can think of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from smoke.kernels.quantize.api import Direction, Format, Scaling, Spec, operand, quantize, random_bits_like
from smoke.precision.recipe import RECIPES

SPECS = {
    f"{name}-{role}-{spec.format.name}": spec
    for name, recipe in RECIPES.items()
    for gradient in recipe.dy
    for role, spec in recipe.specs(gradient).items()
} | {"nvfp4-plain": Spec(Format.E2M1, Scaling.NV_16)}
CURRENT = {name: spec for name, spec in SPECS.items() if spec.scaling is not Scaling.TENSOR_DELAYED}
DIRECTIONS: tuple[Direction, ...] = ("row", "col")

few = settings(max_examples=20, deadline=None, derandomize=True, database=None)


def matrices(any_bits: st.SearchStrategy[int]) -> st.SearchStrategy[torch.Tensor]:
    """32 x 32, a few numbers of their own on a background of one."""
    elements = arrays(np.int16, (32, 32), elements=any_bits, fill=any_bits)
    return elements.map(lambda bits: torch.from_numpy(bits).view(torch.bfloat16))


def bits_of_exponents(low: int, high: int) -> st.SearchStrategy[int]:
    """int16 patterns of BF16 numbers with biased exponents in [low, high], of both signs, and of zeros."""
    magnitude = st.integers(low << 7, (high << 7) + 0x7F)
    signed = st.tuples(magnitude, st.booleans()).map(lambda pair: pair[0] - 0x8000 if pair[1] else pair[0])
    return st.one_of(signed, st.just(0))


finite = matrices(bits_of_exponents(0, 254))
middling = matrices(bits_of_exponents(127 - 24, 127 + 24))
numbers = matrices(st.integers(-(2**15), 2**15 - 1))


def arguments(spec: Spec, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {}
    if spec.scaling is Scaling.TENSOR_DELAYED:
        found["scale"] = torch.tensor(0.7)
    if spec.stochastic:
        found["random_bits"] = random_bits_like(x, torch.Generator().manual_seed(3))
    return found


@pytest.mark.parametrize("name", [name for name, spec in CURRENT.items() if spec.format is not Format.E2M1])
@pytest.mark.parametrize("direction", DIRECTIONS)
@given(x=finite)
@few
def test_finite_numbers_never_saturate(name, direction, x):
    """Before the cast nothing is beyond the largest number, but for the rounding of a scale that is no power of two."""
    spec = CURRENT[name]
    quantized = quantize(x, spec, direction)
    scale = quantized.scale if spec.scaling.per_tensor else quantized.block_scale()
    assert (x.double().abs() / scale.double()).max() <= spec.format.value.largest * (1 + 2.0**-22)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@given(x=numbers)
@few
def test_nan_stays_nan_in_fp8_and_becomes_six_in_fp4(name, direction, x):
    spec = SPECS[name]
    if spec.hadamard and direction == "col":
        return  # the transform spreads a NaN over its group
    given_ = arguments(spec, x)
    quantized = quantize(x, spec, direction, **given_)
    values = operand(x, spec, direction, **given_).values
    if spec.format is Format.E2M1:
        assert (quantized.codes[x.isnan()] == 7).all()
        assert not values.isnan().any()
    else:
        assert torch.equal(quantized.elements().isnan(), x.isnan())
        assert torch.equal(values.isnan(), x.isnan())


@pytest.mark.parametrize("name", SPECS)
@given(x=numbers)
@few
def test_col_is_row_of_the_transposed(name, x):
    spec = SPECS[name]
    if spec.hadamard:
        return
    given_ = arguments(spec, x)
    col = quantize(x, spec, "col", **given_)
    row = quantize(x.mT.contiguous(), spec, "row", **{k: v.mT if v.dim() else v for k, v in given_.items()})
    assert torch.equal(col.codes, row.codes.mT)
    assert torch.equal(col.scale, row.scale if row.scale.dim() == 0 else row.scale.mT)


def test_hadamard_col_is_not_row_of_the_transposed():
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    spec = RECIPES["nvfp4"].specs()["x"]
    assert not torch.equal(quantize(x, spec, "col").codes, quantize(x.mT.contiguous(), spec, "row").codes.mT)


@pytest.mark.parametrize("name", CURRENT)
@pytest.mark.parametrize("direction", DIRECTIONS)
@given(x=middling, power=st.integers(-30, 30))
@few
def test_powers_of_two_pass_through(name, direction, x, power):
    """Away from the ends of the range."""
    spec = CURRENT[name]
    factor = 2.0**power
    plain, scaled = (operand(y, spec, direction, **arguments(spec, x)) for y in (x, x * factor))
    if plain.factor is None:
        assert torch.equal(plain.values * factor, scaled.values)
    else:
        assert torch.equal(plain.values, scaled.values)
        assert scaled.factor is not None
        expected = plain.factor if not x.any() else plain.factor * factor
        assert torch.equal(expected, scaled.factor)


@pytest.mark.parametrize("name", [name for name, spec in CURRENT.items() if spec.scaling.family in ("mx", "block")])
@pytest.mark.parametrize("direction", DIRECTIONS)
@given(x=middling)
@few
def test_quantizing_twice_changes_nothing(name, direction, x):
    """Power-of-two scales: the values are on the grid of a scale that is the same or half as large."""
    spec = CURRENT[name]
    once = operand(x, spec, direction).values
    assert torch.equal(operand(once, spec, direction).values, once)


@given(x=middling)
@few
def test_hadamard_transform_keeps_the_norm_and_inverts(x):
    from smoke.kernels.quantize.casts import HADAMARD_GROUP, HADAMARD_NEGATIVE, hadamard

    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < HADAMARD_GROUP:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.tensor([-1.0 if HADAMARD_NEGATIVE >> i & 1 else 1.0 for i in range(HADAMARD_GROUP)]).double()
    exact = (matrix * signs * 0.25) @ x.double().view(-1, HADAMARD_GROUP, 32)
    assert torch.equal(hadamard(x), exact.float().bfloat16().view(32, 32))


def test_stochastic_rounding_is_unbiased():
    """All 256 random bits once: the mean is the number itself, up to the 1/256 that eight bits can say."""
    spec = Spec(Format.E2M1, Scaling.NV_16, stochastic=True)
    x = torch.zeros(256, 16)
    x[:, 0], x[:, 1:8] = 6.0, torch.tensor([0.3125, 0.75, 1.25, 1.8125, 2.5, 3.25, 5.0])
    bits = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(256, 16)
    values = operand(x.bfloat16(), spec, "row", random_bits=bits).values.float() / 448
    assert (values.mean(0) - x[0]).abs().max() <= 2 / 256
    assert torch.equal(values[:, 0], x[:, 0])
