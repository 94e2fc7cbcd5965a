"""The definition against known answers, bit for bit: codes, scales, delayed traces, special values, whole linears.

tests/golden/recipes.index.json says what each array is and which oracles agreed on it. Golden NVFP4 and 128-block
arrays of the col direction describe the transposed tensor, ours keep the layout of the input.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
import torch
from operands import both

from smoke.kernels.quantize.api import Format, Scaling, Spec, delayed_update, operand, quantize
from smoke.kernels.quantize.casts import encode_stochastic
from smoke.kernels.quantize.reference import amax
from smoke.kernels.support import product
from smoke.precision.recipe import RECIPES

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
ARRAYS = np.load(GOLDEN / "recipes.npz")
INDEX = json.loads((GOLDEN / "recipes.index.json").read_text())["vectors"]


def named(start: str) -> list[str]:
    found = [name for name in INDEX if name.startswith(start)]
    assert found
    return found


def array(vector: str, field: str) -> torch.Tensor:
    return torch.from_numpy(ARRAYS[f"{vector}__{field}"])


def source(vector: str, field: str = "x") -> torch.Tensor:
    return array(vector, field).view(torch.bfloat16)


def same_bits(ours: torch.Tensor, golden: torch.Tensor) -> bool:
    assert ours.shape == golden.shape
    assert ours.dtype == golden.dtype
    return ours.contiguous().numpy().tobytes() == golden.contiguous().numpy().tobytes()


def test_every_vector_is_used():
    starts = ("mxfp8", "nvfp4", "fp8cs", "delayed", "fp8_cast", "fp8blk", "linear")
    assert all(name.startswith(starts) for name in INDEX)
    assert len(INDEX) == 28


@pytest.mark.parametrize("vector", [v for v in INDEX if v.startswith("mxfp8") and v != "mxfp8_specials"])
@pytest.mark.parametrize("direction", ["row", "col"])
def test_mxfp8(vector, direction):
    spec = Spec(Format[INDEX[vector]["fmt"]], Scaling.MX_32)
    ours = quantize(source(vector), spec, direction)
    assert same_bits(ours.codes, array(vector, f"codes_{direction}"))
    assert same_bits(ours.scale, array(vector, f"scale_{direction}"))
    assert same_bits(ours.dequantize(), array(vector, f"deq_{direction}"))


def test_mxfp8_specials():
    golden = array("mxfp8_specials", "codes_row")
    ours = quantize(source("mxfp8_specials"), Spec(Format.E4M3, Scaling.MX_32), "row")
    assert same_bits(ours.scale, array("mxfp8_specials", "scale_row"))
    is_nan = golden & 0x7F == 0x7F
    assert is_nan.any()
    assert torch.equal(ours.codes & 0x7F == 0x7F, is_nan)
    assert torch.equal(ours.codes[~is_nan], golden[~is_nan])


def nv_spec(kind: str) -> Spec:
    scaling = Scaling.NV_16x16 if kind == "wgt" else Scaling.NV_16
    return Spec(Format.E2M1, scaling, hadamard=kind == "act")


@pytest.mark.parametrize("vector", named("nvfp4"))
@pytest.mark.parametrize("kind", ["act", "wgt", "plain"])
@pytest.mark.parametrize("direction", ["row", "col"])
def test_nvfp4(vector, kind, direction):
    field = f"{kind}_codes_{direction}"
    if field not in INDEX[vector]["arrays"]:
        assert vector in ("nvfp4_stochastic_rounding", "nvfp4_denorm") or field == "plain_codes_row"
        return
    ours = quantize(source(vector), nv_spec(kind), direction)
    codes, scale, deq = ours.codes, ours.scale, ours.dequantize()
    if direction == "col":
        codes, scale, deq = codes.mT, scale.mT, deq.mT
    if kind == "wgt":
        scale = scale.repeat_interleave(16, 0)
    assert same_bits(codes, array(vector, field))
    assert same_bits(scale, array(vector, f"{kind}_scale_{direction}"))
    assert same_bits(ours.amax.view(1), array(vector, f"{kind}_amax_{direction}"))
    if f"{kind}_deq_{direction}" in INDEX[vector]["arrays"]:
        assert torch.equal(deq, array(vector, f"{kind}_deq_{direction}"))


def test_nvfp4_stochastic_rounding():
    vector = "nvfp4_stochastic_rounding"
    assert same_bits(encode_stochastic(array(vector, "x"), array(vector, "rbits8")), array(vector, "codes"))


@pytest.mark.parametrize("vector", named("fp8cs"))
@pytest.mark.parametrize("format", [Format.E4M3, Format.E5M2])
def test_current_scaling(vector, format):
    word, x = format.name.lower(), source(vector)
    assert same_bits(amax(x).view(1), array(vector, "amax"))
    for direction in ("row", "col"):
        ours = quantize(x, Spec(format, Scaling.TENSOR_CURRENT), direction)
        assert same_bits(ours.codes, array(vector, f"{word}_codes"))
        assert same_bits(ours.scale.view(1), array(vector, f"{word}_scale_inv"))
    rounded = quantize(x, Spec(format, Scaling.TENSOR_CURRENT, power_of_two=True), "row")
    assert same_bits((1 / rounded.scale).view(1), array(vector, f"{word}_p2_scale"))


@pytest.mark.parametrize("word", ["e4m3", "e5m2"])
def test_cast_with_a_given_scale(word):
    vector = "fp8_cast_given_scale"
    spec = Spec(Format[word.upper()], Scaling.TENSOR_DELAYED)
    ours = quantize(source(vector), spec, "row", scale=array(vector, f"scale_{word}")[0])
    assert same_bits(ours.codes, array(vector, f"codes_{word}"))
    if word == "e4m3":
        assert same_bits(ours.scale.view(1), array(vector, "scale_inv_e4m3"))


@pytest.mark.parametrize("vector", named("delayed"))
def test_delayed_trace(vector):
    _, *algorithm, length, margin, way = vector.split("_")
    history, scale = torch.zeros(1, int(length[1:])), torch.ones(1)
    format_max = 448.0 if way == "fwd" else 57344.0
    for step, running in enumerate(array(vector, "amax")):
        history[:, 0] = running
        history, scale = delayed_update(
            history, scale, format_max, algorithm="_".join(algorithm), margin=int(margin[1:])
        )
        assert same_bits(scale, array(vector, "scale_after_fused")[step : step + 1]), f"step {step}"
        assert same_bits(history[0], array(vector, "history_after_fused")[step]), f"step {step}"


def test_delayed_traces_of_many_slots_in_one_call():
    vectors = ["delayed_max_L4_m0_fwd", "delayed_max_L4_m0_bwd"]
    history, scale = torch.zeros(2, 4), torch.ones(2)
    amaxes = torch.stack([array(v, "amax") for v in vectors], dim=1)
    for step, running in enumerate(amaxes):
        history[:, 0] = running
        history, scale = delayed_update(history, scale, torch.tensor([448.0, 57344.0]))
        assert same_bits(scale, torch.stack([array(v, "scale_after_fused")[step] for v in vectors]))


@pytest.mark.parametrize("vector", named("fp8blk"))
@pytest.mark.parametrize("dims", ["1d", "2d"])
@pytest.mark.parametrize("direction", ["row", "col"])
def test_blockwise(vector, dims, direction):
    entry = INDEX[vector]
    if f"{dims}_scale_inv_{direction}" not in entry["arrays"]:
        assert dims == "2d"
        return
    scaling = Scaling.BLOCK_1D_128 if dims == "1d" else Scaling.BLOCK_2D_128
    ours = quantize(source(vector), Spec(Format.E4M3, scaling, power_of_two=entry["pow2_scales"]), direction)
    codes, scale = (ours.codes, ours.scale) if direction == "row" else (ours.codes.mT, ours.scale.mT)
    assert same_bits(scale, array(vector, f"{dims}_scale_inv_{direction}"))
    if f"{dims}_codes_{direction}" in entry["arrays"]:
        assert same_bits(codes, array(vector, f"{dims}_codes_{direction}"))
    else:
        assert torch.equal(codes.mT, quantize(source(vector), ours.spec, "row").codes)


@pytest.mark.parametrize(("vector", "name"), [("linear_fp8cs_hybrid", "fp8-tensorwise"), ("linear_mxfp8", "mxfp8")])
def test_linear(vector, name):
    """y, dx, dw within one BF16 ulp of the float64 result."""
    specs = RECIPES[name].specs()
    x, x_col = both(source(vector, "x"), specs["x"])
    w, w_col = both(source(vector, "w"), specs["w"])
    dy, dy_col = both(source(vector, "dy"), specs["dy"])
    gemms = {
        "y": (x.values, w.values.mT, x.factor, w.factor),
        "dx": (dy.values, w_col.values, dy.factor, w_col.factor),
        "dw": (dy_col.values.mT, x_col.values, dy_col.factor, x_col.factor),
    }
    for field, (a, b, a_factor, b_factor) in gemms.items():
        factor = None if a_factor is None else a_factor * b_factor
        ours = product(a, b, factor=factor, out_dtype=torch.bfloat16).float()
        golden = array(vector, field)
        ulp = torch.exp2(torch.floor(torch.log2(golden.abs().clamp(min=1e-30))) - 7)
        assert ((ours - golden).abs() <= ulp).all(), field


def test_operand_is_the_dequantized_golden_vector():
    for vector in named("mxfp8_n"):
        for direction in ("row", "col"):
            values, factor = operand(source(vector), Spec(Format.E4M3, Scaling.MX_32), direction)
            assert factor is None
            assert torch.equal(values.float(), array(vector, f"deq_{direction}"))
