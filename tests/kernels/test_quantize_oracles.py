"""The quantizers against libraries that others wrote, and whole linears against float64.

torchao's RCEIL is Transformer Engine's scale for BF16 blocks whose E8M0 code is not zero and that hold no NaN; gfloat
rounds exactly, so with a rational ceil(log2) it is an oracle everywhere.
"""

from __future__ import annotations

import math

import gfloat
import gfloat.formats
import numpy as np
import pytest
import torch
from operands import both

from smoke.kernels.quantize.api import Format, Operand, Scaling, Spec, operand, quantize
from smoke.kernels.quantize.casts import encode, encode_stochastic
from smoke.kernels.support import product
from smoke.numerics import relative_norm
from smoke.precision.recipe import RECIPES

GFLOAT = {
    Format.E4M3: gfloat.formats.format_info_ocp_e4m3,
    Format.E5M2: gfloat.formats.format_info_ocp_e5m2,
    Format.E2M1: gfloat.formats.format_info_ocp_e2m1,
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wide(*shape: int, low: int = -20, high: int = 20, seed: int = 0) -> torch.Tensor:
    exponents = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed + 1))
    return normal(*shape, seed=seed) * torch.exp2(exponents.float())


@pytest.mark.parametrize("format", list(Format))
def test_casts_round_as_gfloat_does(format):
    y = torch.cat((wide(4000, low=-14, high=16), torch.linspace(-7, 7, 1793), torch.tensor([0.0, -0.0, 1e30, -1e30])))
    codes = encode(y, format)
    oracle = gfloat.round_ndarray(GFLOAT[format], y.double().numpy(), sat=True)
    ours = gfloat.decode_ndarray(GFLOAT[format], codes.numpy())
    assert np.array_equal(ours, oracle)
    assert np.array_equal(np.signbit(ours), np.signbit(y.numpy()))


def test_stochastic_casts_round_as_gfloat_does():
    """Its fastest mode is Transformer Engine's formula; its other ones first round the distance to the random bits."""
    y = wide(3000, low=-3, high=2).clamp(-8, 8)
    bits = torch.randint(0, 256, y.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    oracle = gfloat.round_ndarray(
        GFLOAT[Format.E2M1],
        y.double().numpy(),
        rnd=gfloat.RoundMode.StochasticFastest,
        sat=True,
        srbits=bits.numpy().astype(np.int64),
        srnumbits=8,
    )
    ours = gfloat.decode_ndarray(GFLOAT[Format.E2M1], encode_stochastic(y, bits).numpy())
    assert np.array_equal(ours, oracle)


@pytest.mark.parametrize("format", [Format.E4M3, Format.E5M2])
@pytest.mark.parametrize("low", [-133, -20, 90])
def test_mxfp8_is_a_rational_ceil_and_an_exact_rounding(format, low):
    x = wide(32, 64, low=low, high=low + 30).bfloat16()
    ours = quantize(x, Spec(format, Scaling.MX_32), "row")
    for block in range(2):
        numbers = x[:, 32 * block : 32 * block + 32].double().numpy()
        for row, values in enumerate(numbers):
            fraction, exponent = math.frexp(np.abs(values).max() / format.value.largest)
            power = max(exponent - (fraction == 0.5), -127) if fraction else -127
            assert ours.scale[row, block] == power + 127
            oracle = gfloat.round_ndarray(GFLOAT[format], values * 2.0**-power, sat=True)
            codes = ours.codes[row, 32 * block : 32 * block + 32]
            assert np.array_equal(gfloat.decode_ndarray(GFLOAT[format], codes.numpy()), oracle)


@pytest.mark.filterwarnings("ignore")  # torchao's own deprecations
@pytest.mark.parametrize(("format", "dtype"), [(Format.E4M3, torch.float8_e4m3fn), (Format.E5M2, torch.float8_e5m2)])
@pytest.mark.parametrize("x", [normal(64, 128), wide(64, 128), torch.zeros(32, 32)], ids=["normal", "wide", "zero"])
def test_mxfp8_is_torchao_rceil(format, dtype, x):
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    x = x.bfloat16()
    scale, codes = to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
    ours = quantize(x, Spec(format, Scaling.MX_32), "row")
    assert torch.equal(ours.scale, scale.view(torch.uint8).view_as(ours.scale))
    assert torch.equal(ours.codes, codes.view(torch.uint8).view_as(ours.codes))


def float64_scale(x: torch.Tensor, block: tuple[int, int], spread) -> torch.Tensor:
    """``spread(amax)`` of every block of x, at each element, written anew: loops over blocks, in float64."""
    scale = torch.empty(x.shape, dtype=torch.float64)
    for top in range(0, x.shape[0], block[0]):
        for left in range(0, x.shape[1], block[1]):
            part = (slice(top, top + block[0]), slice(left, left + block[1]))
            scale[part] = spread(x[part].double().abs().max().item())
    return scale


def round_e4m3(y: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gfloat.round_ndarray(GFLOAT[Format.E4M3], y.numpy(), sat=True))


def round_e2m1(y: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gfloat.round_ndarray(GFLOAT[Format.E2M1], y.numpy(), sat=True))


def test_blockwise_values_by_float64():
    x = wide(150, 300, low=-6, high=6).bfloat16()
    specs = RECIPES["fp8-blockwise"].specs()
    for role, direction, block in (("x", "row", (1, 128)), ("x", "col", (128, 1)), ("w", "row", (128, 128))):
        scale = float64_scale(x, block, lambda amax: 2.0 ** math.floor(math.log2(448 / amax)))
        oracle = round_e4m3(x.double() * scale) / scale
        assert torch.equal(operand(x, specs[role], direction).values.double(), oracle)


def test_delayed_values_by_float64():
    x = normal(96, 64).bfloat16()
    scale = torch.tensor(100.3)
    spec = RECIPES["fp8-delayed"].specs()["x"]
    ours = operand(x, spec, "row", scale=scale)
    product_in_float32 = (x.double() * scale.double()).float().double()
    assert torch.equal(ours.values.double(), round_e4m3(product_in_float32))
    assert ours.factor is not None
    assert ours.factor.item() == np.float32(1) / np.float32(100.3)


@pytest.mark.parametrize(("role", "block"), [("x", (1, 16)), ("w", (16, 16))])
def test_nvfp4_numbers_by_float64(role, block):
    """float64 rounds where float32 does not, so elements within 2^-20 of a tie are left out."""
    x = wide(64, 96, low=-2, high=2).bfloat16()
    tensor_scale = 2688 / x.double().abs().max()
    block_scale = float64_scale(x, block, lambda amax: round_e4m3(torch.tensor([amax * tensor_scale / 6])).item())
    scaled = x.double() * tensor_scale / block_scale
    near_tie = torch.stack([(scaled.abs() - t).abs() < t * 2**-20 for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)])
    certain = ~near_tie.any(0)
    ours = operand(x, RECIPES["nvfp4"].specs()[role], "row").values.double()
    assert certain.double().mean() > 0.97
    assert torch.equal(ours[certain], (round_e2m1(scaled) * block_scale)[certain])


def linear(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, name: str) -> dict[str, tuple[Operand, Operand]]:
    """The operands of y, dx, dw as [M, K] and [K, N]."""
    specs = RECIPES[name].specs()
    scales = {role: torch.tensor(s) if name == "fp8-delayed" else None for role, s in (("x", 90.0), ("w", 3e3))}
    random = torch.Generator().manual_seed(11)
    x_row, x_col = both(x, specs["x"], scale=scales["x"])
    w_row, w_col = both(w, specs["w"], scale=scales["w"])
    dy_row, dy_col = both(dy, specs["dy"], scale=scales["w"], generator=random)
    return {
        "y": (x_row, Operand(w_row.values.mT, w_row.factor)),
        "dx": (dy_row, w_col),
        "dw": (Operand(dy_col.values.mT, dy_col.factor), x_col),
    }


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "bf16"])
def test_linear_is_the_float64_product_of_its_operands(name):
    """Within one BF16 ulp of the float64 result, and as near to the unquantized product as the format allows."""
    tokens, inputs, outputs = 128, 256, 192
    x, w, dy = normal(tokens, inputs), normal(outputs, inputs, seed=1) / 16, normal(tokens, outputs, seed=2) / 100
    x, w, dy = x.bfloat16(), w.bfloat16(), dy.bfloat16()
    unquantized = {"y": x.double() @ w.double().mT, "dx": dy.double() @ w.double(), "dw": dy.double().mT @ x.double()}
    noise = 0.3 if name == "nvfp4" else 0.1
    for gemm, (a, b) in linear(x, w, dy, name).items():
        factor = None if a.factor is None or b.factor is None else a.factor * b.factor
        ours = product(a.values, b.values, factor=factor, out_dtype=torch.bfloat16).double()
        exact = a.values.double() @ b.values.double() * (1.0 if factor is None else factor.double())
        ulp = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1e-300))) - 7)
        rounding = 2**-20 * (a.values.double().abs() @ b.values.double().abs()) * (1.0 if factor is None else factor)
        assert ((ours - exact).abs() <= ulp + rounding).all(), gemm
        assert 0.005 < float(relative_norm(ours, unquantized[gemm])) < noise, gemm
