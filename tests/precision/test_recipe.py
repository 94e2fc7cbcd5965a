"""The recipe table: words, operands, gates, sizes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from smoke.config import PRECISIONS
from smoke.kernels.quantize.spec import FORMAT_MAX, Format, Scaling
from smoke.precision.recipe import RECIPES, canonical


def test_names_are_those_of_the_configuration():
    assert tuple(RECIPES) == PRECISIONS
    assert all(name == recipe.name for name, recipe in RECIPES.items())


@pytest.mark.parametrize(
    ("word", "name"),
    [
        *((name, name) for name in RECIPES),
        *((name.upper().replace("-", "_"), name) for name in RECIPES),
        ("delayed", "fp8-delayed"),
        ("DelayedScaling", "fp8-delayed"),
        ("tensorwise", "fp8-tensorwise"),
        ("fp8-current", "fp8-tensorwise"),
        ("current", "fp8-tensorwise"),
        ("Float8CurrentScaling", "fp8-tensorwise"),
        ("blockwise", "fp8-blockwise"),
        ("Float8BlockScaling", "fp8-blockwise"),
        ("MXFP8BlockScaling", "mxfp8"),
        ("NVFP4BlockScaling", "nvfp4"),
        ("fp4", "nvfp4"),
    ],
)
def test_words(word, name):
    assert canonical(word).name == name


def test_no_spelling_means_two_recipes():
    spellings = [s.lower().replace("-", "") for r in RECIPES.values() for s in (r.name, *r.synonyms)]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize(("word", "near"), [("mxfp9", "mxfp8"), ("nvfp", "nvfp4"), ("blokwise", "fp8-blockwise")])
def test_unknown_word_names_the_nearest(word, near):
    with pytest.raises(ValueError, match=rf"'{word}' is no precision; the nearest is {near} "):
        canonical(word)


@pytest.mark.parametrize("word", ["fp9", "", "hybrid", "x" * 50])
def test_any_unknown_word_is_an_error_with_the_list(word):
    with pytest.raises(ValueError, match="bf16, fp8-delayed, fp8-tensorwise, fp8-blockwise, mxfp8, nvfp4"):
        canonical(word)


def test_gradient_formats():
    """Delayed and tensorwise default to hybrid (E5M2 gradients), the block recipes to E4M3."""
    default = {name: recipe.specs()["dy"].format for name, recipe in RECIPES.items() if recipe.specs()}
    assert default == {
        "fp8-delayed": Format.E5M2,
        "fp8-tensorwise": Format.E5M2,
        "fp8-blockwise": Format.E4M3,
        "mxfp8": Format.E4M3,
        "nvfp4": Format.E2M1,
    }
    for name in ("fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "mxfp8"):
        for word in ("e4m3", "E5M2"):
            assert RECIPES[name].specs(word)["dy"].format.name == word.upper()
            assert RECIPES[name].specs(word)["x"].format is Format.E4M3
    assert RECIPES["bf16"].specs("e5m2") == {}
    with pytest.raises(ValueError, match="nvfp4 has e2m1"):
        RECIPES["nvfp4"].specs("e5m2")


def test_operands():
    blockwise, mxfp8, nvfp4 = (RECIPES[name].specs() for name in ("fp8-blockwise", "mxfp8", "nvfp4"))
    assert [blockwise[role].scaling for role in ("x", "w", "dy")] == [
        Scaling.BLOCK_1D_128,
        Scaling.BLOCK_2D_128,
        Scaling.BLOCK_1D_128,
    ]
    assert all(spec.power_of_two for spec in blockwise.values())
    assert {spec.scaling for spec in mxfp8.values()} == {Scaling.MX_32}
    assert [nvfp4[role].scaling for role in ("x", "w", "dy")] == [Scaling.NV_16, Scaling.NV_16x16, Scaling.NV_16]
    assert [nvfp4[role].hadamard for role in ("x", "w", "dy")] == [True, False, True]
    assert [nvfp4[role].stochastic for role in ("x", "w", "dy")] == [False, False, True]


def test_blocks_turn_with_the_direction():
    assert Scaling.MX_32.block("row") == (1, 32)
    assert Scaling.MX_32.block("col") == (32, 1)
    assert Scaling.NV_16x16.block("row") == Scaling.NV_16x16.block("col") == (16, 16)
    assert [s.name for s in Scaling if s.symmetric] == [
        "TENSOR_DELAYED",
        "TENSOR_CURRENT",
        "BLOCK_2D_128",
        "NV_16x16",
    ]


def test_formats():
    assert FORMAT_MAX == {Format.E4M3: 448.0, Format.E5M2: 57344.0, Format.E2M1: 6.0}
    for format in Format:
        grid = format.value
        assert 1 + grid.exponent_bits + grid.mantissa_bits in (4, 8)
        assert grid.min_exponent == 1 - grid.bias
        assert 2.0**grid.largest_exponent <= grid.largest < 2.0 ** (grid.largest_exponent + 1)


def test_sizes():
    assert {name: recipe.row_multiples for name, recipe in RECIPES.items()} == {
        "bf16": (1, 1, 1),
        "fp8-delayed": (16, 16, 16),
        "fp8-tensorwise": (16, 16, 16),
        "fp8-blockwise": (16, 16, 16),
        "mxfp8": (32, 32, 32),
        "nvfp4": (16, 16, 16),
    }
    assert [recipe.expert_row_multiple for recipe in RECIPES.values()] == [1, 16, 16, 16, 32, 128]


@pytest.mark.parametrize(("layers", "kept"), [(1, 1), (3, 1), (6, 1), (7, 2), (20, 3), (61, 10)])
def test_nvfp4_keeps_the_last_layers(layers, kept):
    assert RECIPES["nvfp4"].last_layers_bf16(layers) == kept
    assert RECIPES["mxfp8"].last_layers_bf16(layers) == 0


@pytest.mark.parametrize(
    ("name", "runs", "refused"),
    [
        ("fp8-delayed", [(8, 9), (9, 0), (12, 0)], [(8, 0), None]),
        ("fp8-tensorwise", [(8, 9), (10, 0)], [(8, 6)]),
        ("fp8-blockwise", [(9, 0), (10, 0)], [(8, 9)]),
        ("mxfp8", [(10, 0), (10, 3)], [(9, 0), (12, 0), None]),
        ("nvfp4", [(10, 0), (12, 0)], [(9, 0)]),
    ],
)
def test_gates(name, runs, refused):
    gate = RECIPES[name].gate
    assert gate is not None
    assert gate.first_release
    assert [gate.blocker(capability) for capability in runs] == [""] * len(runs)
    assert all(gate.blocker(capability) for capability in refused)


def test_limits_are_two_sided():
    for name, recipe in RECIPES.items():
        limits = recipe.limits
        assert 0 <= limits.gradient_error_min < limits.gradient_error_max <= limits.gradient_error_slice_max
        assert (limits.gradient_error_min > 0) == (name != "bf16")


def test_torch_is_not_imported():
    code = "import sys, smoke.precision.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
