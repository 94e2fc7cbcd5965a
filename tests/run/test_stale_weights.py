"""weight_freshness in the running program: sound recipes are green, a cache that outlives an update is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_runs import SMALL, finding, red, small_session

import smoke.precision.emulated as emulated
from smoke.config import PolicyConfig
from smoke.faults import by_name, injected
from smoke.precision.weights import MultipliedWeights
from smoke.trajectories import untouched_random_states

SHAPES = {
    "absorbed by the recipe": {"policy": PolicyConfig(absorbed_kv="recipe", last_layers_bf16=0)},
    "plain": {"model": replace(SMALL, attention_form="plain"), "policy": PolicyConfig(last_layers_bf16=0)},
}


def _pairs(session, steps=2):
    """All pairs of the second step: names, and whether used and fresh have the same bits."""
    source = MultipliedWeights(session.precision.runtime, session.model)
    step = session.step(session.optimizer())
    found = []
    for number, batch in enumerate(session.batches[:steps]):
        source.watch(source.modules() if number == steps - 1 else ())
        step([batch], lambda: found.extend(source.take()))
    return source, found


def _equal(pair):
    return all(torch.equal(a, b) for a, b in zip(pair.used, pair.fresh, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4"])
def test_every_weight_that_is_multiplied_is_fresh(precision, shape):
    with untouched_random_states():
        session = small_session(precision=precision, **SHAPES[shape])
        source, pairs = _pairs(session)
    assert {(pair.module, pair.direction) for pair in pairs} == {
        (module, direction) for module in source.modules() for direction in ("row", "col")
    }
    assert all(_equal(pair) for pair in pairs)
    assert any(pair.parameter == "weight3" for pair in pairs)
    assert any(pair.parameter == "head 1" for pair in pairs) == (shape == "absorbed by the recipe")
    replays = [pair for pair in pairs if "linear_q_up_proj" in pair.module and pair.direction == "row"]
    assert len(replays) == 6  # two layers and the prediction module, first pass and replay


def test_a_leaf_that_multiplies_another_tensor_than_its_parameter_is_found():
    """The leaf holds a copy of what its module registers, and what the optimizer moves."""
    with untouched_random_states():
        session = small_session(precision="mxfp8")
        leaf = session.model.get_submodule("layers.0.mlp.linear_fc1")
        copy = leaf.weight.detach().clone().requires_grad_()
        leaf.multiply = lambda x_TI: emulated._QuantizedProduct.apply(x_TI, [x_TI.shape[0]], [leaf.quantizers], copy)
        with torch.no_grad():
            leaf.weight.mul_(1.5)
        _, pairs = _pairs(session, steps=1)
    assert {pair.module for pair in pairs if not _equal(pair)} == {"layers.0.mlp.linear_fc1"}


@pytest.mark.parametrize("precision", ["fp8-delayed", "nvfp4"])
def test_weights_that_are_not_quantized_again(precision):
    with injected(by_name("weight-cache-never-refreshed")), untouched_random_states():
        _, pairs = _pairs(small_session(precision=precision))
    stale = [pair for pair in pairs if not _equal(pair)]
    assert len(stale) > len(pairs) / 2
    assert {pair.direction for pair in stale} == {"row", "col"}


def test_stale_weights_turn_the_run_red(run):
    with injected(by_name("weight-cache-never-refreshed")):
        report = run(precision="mxfp8")
    fault = by_name("weight-cache-never-refreshed")
    assert {"weight_freshness"} <= red(report) <= {*fault.red, *fault.may_follow}
    assert "step 1 " in finding(report, "weight_freshness")["where"]
    assert report["exit_code"] == 1
