"""Faults injected into the running program: the right checks go red, at the right place, and the others stay green.

``smoke selftest`` shows every fault; here stand those whose report says more than which checks are red.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from small_runs import finding, red

from smoke.config import PolicyConfig
from smoke.faults import by_name, injected


@pytest.fixture
def faulty(run):
    """``faulty(name, **changes)``: the report of the small run with that fault, red exactly where the fault says."""

    def execute(name, **changes):
        fault = by_name(name)
        with injected(fault):
            report = run(**{**fault.changes, **changes})
        assert set(fault.red) <= red(report) <= {*fault.red, *fault.may_follow}
        return report

    return execute


def test_replay_outside_the_quantization_context(faulty):
    report = faulty("replay-in-bf16")
    assert report["exit_code"] == 1
    assert "linear_q_up_proj" in finding(report, "coverage")["where"]
    assert "step 0" in finding(report, "recompute_parity")["where"]


@pytest.mark.parametrize("name", ["stale-scale", "amax-counted-twice"])
def test_scales_of_delayed_scaling(faulty, name):
    assert finding(faulty(name), "recompute_parity")["status"] == "FAIL"


@pytest.mark.parametrize("precision", ["mxfp8", "fp8-delayed"])
def test_conversion_that_matches_nothing(faulty, precision):
    report = faulty("nothing-converted", precision=precision, steps=7)
    assert report["exit_code"] == 1
    assert report["summary"]["steps"] == 7


def test_e5m2_gradients_under_mxfp8(faulty):
    assert "dy" in finding(faulty("e5m2-gradients"), "quantizer")["where"]


def test_nan_that_nvfp4_would_hide(faulty):
    """Nothing downstream of the cast is NaN, the loss of the poisoned step included."""
    report = faulty("nan-hidden-by-cast")
    assert "self_attention" in finding(report, "finite")["where"]
    assert report["summary"]["loss_last"] is not None


def test_batch_whose_every_label_is_ignored(faulty):
    assert faulty("every-label-ignored")["summary"]["loss_last"] is None


def test_random_draws_that_differ_between_two_runs(faulty):
    """The noise floor is not zero: recompute cannot be judged."""
    report = faulty("random-state-not-restored")
    assert finding(report, "recompute_parity")["status"] == "ERROR"
    assert report["exit_code"] == 3


def test_stochastic_rounding_that_no_random_state_governs(run, monkeypatch):
    import smoke.precision.emulated as emulated

    operand, count = emulated.operand, iter(range(10**6))

    def unseeded(x, spec, direction, **kwargs):
        if spec.stochastic:
            kwargs["generator"] = torch.Generator().manual_seed(next(count))
        return operand(x, spec, direction, **kwargs)

    monkeypatch.setattr(emulated, "operand", unseeded)
    report = run(precision="nvfp4", policy=PolicyConfig(last_layers_bf16=0))
    assert {"determinism", "recompute_parity"} <= red(report)


def test_a_leaf_that_never_runs_is_not_covered(faulty):
    """The bf16 run whose experts are left out: coverage has no quantized GEMM to judge, and is red all the same."""
    assert "experts" in finding(faulty("experts-left-out"), "coverage")["where"]


def test_a_fault_that_does_nothing_leaves_the_run_green(run):
    harmless = dataclasses.replace(by_name("replay-in-bf16"), inject=contextlib.nullcontext)
    with injected(harmless):
        report = run(**harmless.changes)
    assert red(report) == set()
