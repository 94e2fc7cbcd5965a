"""Known answers: the quantizers give them, and each kind of mistake they are made for is seen."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from smoke.kernels.quantize import reference
from smoke.kernels.quantize.api import Format, Operand, Scaling, Spec, operand, quantize
from smoke.kernels.quantize.known import known_answers, mismatches
from smoke.precision.recipe import RECIPES

SPECS = {
    f"{name}-{role}-{spec.format.name}": spec
    for name, recipe in RECIPES.items()
    for gradient in recipe.dy
    for role, spec in recipe.specs(gradient).items()
} | {
    "nvfp4-plain": Spec(Format.E2M1, Scaling.NV_16),
    "nvfp4-stochastic": Spec(Format.E2M1, Scaling.NV_16, stochastic=True),
}


def wrong(expected: Spec, quantizer) -> list[str]:
    known = known_answers(expected)
    assert known
    return [line for answer in known for line in mismatches(answer, quantizer)]


def quantizer_of(spec: Spec):
    return lambda x, direction, **arguments: operand(x, spec, direction, **arguments)


@pytest.mark.parametrize("name", SPECS)
def test_operands_give_the_known_answers(name):
    assert wrong(SPECS[name], quantizer_of(SPECS[name])) == []


@pytest.mark.parametrize("name", [n for n, spec in SPECS.items() if spec.scaling.family in ("mx", "block")])
def test_the_definition_gives_the_known_answers(name):
    def by_definition(x, direction, **arguments):
        return quantize(x, SPECS[name], direction, **arguments).dequantize(), None

    assert wrong(SPECS[name], by_definition) == []


@pytest.mark.parametrize("name", SPECS)
def test_float32_inputs_give_the_known_answers(name):
    """float32 inputs take the definition's path everywhere."""
    assert wrong(SPECS[name], lambda x, d, **a: operand(x.float(), SPECS[name], d, **a)) == []


OTHERS = [
    ("mxfp8", "dy", {"format": Format.E5M2}),
    ("fp8-blockwise", "dy", {"format": Format.E5M2}),
    ("fp8-tensorwise", "x", {"format": Format.E5M2}),
    ("fp8-tensorwise", "dy", {"format": Format.E4M3}),
    ("fp8-tensorwise", "x", {"power_of_two": True}),
    ("mxfp8", "x", {"scaling": Scaling.BLOCK_1D_128, "power_of_two": True}),
    ("fp8-blockwise", "w", {"scaling": Scaling.BLOCK_1D_128}),
    ("fp8-blockwise", "x", {"scaling": Scaling.BLOCK_2D_128}),
    ("fp8-blockwise", "x", {"scaling": Scaling.MX_32}),
    ("nvfp4", "w", {"scaling": Scaling.NV_16}),
    ("nvfp4", "x", {"hadamard": False}),
    ("nvfp4", "x", {"scaling": Scaling.NV_16x16}),
]


@pytest.mark.parametrize(("recipe", "role", "change"), OTHERS)
def test_another_spec_is_seen(recipe, role, change):
    spec = RECIPES[recipe].specs()[role]
    assert wrong(spec, quantizer_of(dataclasses.replace(spec, **change)))


def test_nearest_rounding_in_place_of_stochastic_is_seen():
    spec = RECIPES["nvfp4"].specs()["dy"]
    nearest = dataclasses.replace(spec, stochastic=False)
    assert wrong(spec, lambda x, direction, scale, random_bits: operand(x, nearest, direction))


def test_floored_scale_is_seen():
    spec = RECIPES["mxfp8"].specs()["x"]

    def floored(x, direction, **_):
        blocks = x.float().view(-1, 2, 32) if direction == "row" else x.float().mT.reshape(-1, 2, 32)
        amax = blocks.abs().nan_to_num(0).amax(-1, keepdim=True)
        scale = torch.exp2(torch.floor(torch.log2(amax.clamp(min=2**-100))) - 8)
        q = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        values = q.view(x.shape) if direction == "row" else q.reshape(x.mT.shape).mT
        return values, None

    lines = wrong(spec, floored)
    assert any("[0, 0]: 448.0, not 512.0" in line for line in lines)


def test_division_by_the_amax_of_a_row_of_zeros_is_seen():
    spec = RECIPES["mxfp8"].specs()["x"]

    def divides(x, direction, **_):
        values, factor = operand(x, spec, direction)
        return torch.where((x == 0).all(1, keepdim=True), torch.nan, values), factor

    assert any("nan, not 0.0" in line for line in wrong(spec, divides))


def test_wrong_factor_is_seen():
    spec = RECIPES["fp8-tensorwise"].specs()["x"]
    halved = lambda x, d, **_: Operand(operand(x, spec, d).values, operand(x, spec, d).factor / 2)  # noqa: E731
    assert all("factor of a product" in line for line in wrong(spec, halved))
    assert wrong(spec, halved)


def test_alpha_of_two_nvfp4_operands_is_transformer_engines_to_the_bit():
    """Every pair of BF16 significands; powers of two change nothing."""
    significands = torch.arange(128, 256).float()
    factors = torch.stack([_nv_factor(s) for s in significands])
    ours = (factors[:, None] * factors[None, :]).float()
    engine = (significands[:, None] * significands[None, :]) * (1 / torch.tensor(36.0 * 448.0 * 448.0))
    assert torch.equal(ours, engine)


@functools.cache
def _nv_factor(amax: torch.Tensor) -> torch.Tensor:
    factor = operand(torch.full((16, 16), float(amax)).bfloat16(), Spec(Format.E2M1, Scaling.NV_16), "row").factor
    assert factor is not None
    return factor


def test_arguments_that_do_not_belong_are_refused():
    x = torch.ones(32, 32).bfloat16()
    mx, delayed = Spec(Format.E4M3, Scaling.MX_32), Spec(Format.E4M3, Scaling.TENSOR_DELAYED)
    for call in (
        lambda: quantize(x, mx, "row", scale=torch.tensor(1.0)),
        lambda: operand(x, delayed, "row"),
        lambda: operand(x, mx, "row", random_bits=torch.zeros(32, 32, dtype=torch.uint8)),
        lambda: operand(x[:, :31], mx, "row"),
        lambda: operand(x[:17], Spec(Format.E2M1, Scaling.NV_16x16), "col"),
        lambda: operand(x.view(2, 16, 32), mx, "row"),
        lambda: operand(x.half(), mx, "row"),
        lambda: operand(x, Spec(Format.E4M3, Scaling.BLOCK_1D_128), "row"),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            call()
    assert reference.quantize(x[:31], mx, "row").codes.shape == (31, 32)
