"""The examples are green as they stand, and red, at the right place, when what they watch is broken."""

from __future__ import annotations

import importlib.util
import math
import pathlib
import warnings

import pytest
import torch
from torch import nn

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpt, mla = _load("plain_gpt"), _load("own_mla")


@pytest.fixture(autouse=True)
def as_a_script():
    """What ``main`` does to warnings and random numbers stays here."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


def _red(verdict):
    return {finding.name for finding in verdict.findings if finding.status != "PASS"}


@pytest.mark.parametrize("example", [gpt, mla], ids=["plain_gpt", "own_mla"])
def test_an_example_is_green(example, capsys):
    assert example.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"PASS"}
    shared = {"gradient_parity:", "finite:", "gradient_presence:", "throughput:"}
    own = {"loss_tracking:"} if example is gpt else {"coverage:", "quantization_engaged:"}
    assert {line.split()[1] for line in lines} == shared | own


def _hook(parameter, change):
    """``change`` the gradient in place once it is complete."""

    def spoil(parameter):
        change(parameter.grad)

    parameter.register_post_accumulate_grad_hook(spoil)


def test_one_head_of_the_gpt_with_a_wrong_gradient():
    verdict = gpt.run(lambda m: _hook(m.blocks[1].qkv.weight, lambda grad: grad[16:32].neg_()))
    assert _red(verdict) == {"gradient_parity"}
    assert verdict["gradient_parity"].where.startswith("blocks.1.qkv.weight")
    errors = {r.slice: r.relative_error for r in verdict.record.gradients if r.parameter == "blocks.1.qkv.weight"}
    assert {name for name, error in errors.items() if name and error > 0.05} == {"query head 1"}


def test_half_of_the_gpt_without_gradient():
    def detach(module):
        module.blocks[0].mlp.register_forward_pre_hook(lambda _, args: (args[0].detach(),))

    verdict = gpt.run(detach)
    assert verdict["gradient_presence"].status == "FAIL"
    assert verdict["gradient_presence"].where == "blocks.0.mlp_norm.weight"
    assert _red(verdict) <= {"gradient_presence", "gradient_parity", "loss_tracking"}


def test_fp8_layers_that_were_never_put_in():
    verdict = mla.run(nn.Linear)
    assert _red(verdict) == {"coverage", "quantization_engaged", "gradient_parity"}
    assert verdict["coverage"].where == "layers.0.q_down output"
    assert verdict["gradient_parity"].limit == ">= 0.015"


def test_one_layer_that_multiplies_without_fp8():
    class Lazy(mla.Fp8Linear):
        def forward(self, x):
            if self.name != "layers.1.kv_up":
                return super().forward(x)
            self.counter.count(self.name, "output", quantized=False)
            return nn.functional.linear(x, self.weight)

    verdict = mla.run(Lazy)
    assert verdict["coverage"].status == "FAIL"
    assert verdict["coverage"].where == "layers.1.kv_up output"
    assert _red(verdict) == {"coverage"}  # its inputs are still those of FP8 layers, so its gradient differs


def test_a_wrong_scale_in_one_product():
    class Doubled(mla.Fp8Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if self.name != "layers.0.kv_up" else y + (y - y.detach())  # gradients twice as large

    verdict = mla.run(Doubled)
    assert verdict["gradient_parity"].status == "FAIL"
    assert "layers.0.kv" in verdict["gradient_parity"].where


def test_a_nan_in_one_gradient():
    verdict = mla.run(spoil=lambda m: _hook(m.layers[0].kv_up.weight, lambda grad: grad[0, 0].fill_(math.nan)))
    assert verdict["finite"].status == "FAIL"
    assert verdict["finite"].where == "step 0 gradient layers.0.kv_up.weight"
