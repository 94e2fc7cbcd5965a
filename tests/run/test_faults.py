"""Faults injected into the running program: the right checks go red, at the right place, and the others stay green."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from small_runs import finding, red

from smoke.config import PolicyConfig
from smoke.kernels.quantize.spec import Format
from smoke.module import SmokeModule
from smoke.precision.emulated import Runtime
from smoke.precision.plugin import EmulatedPrecision


def test_replay_outside_the_quantization_context(run, monkeypatch):
    def first_pass_only(runtime):
        return contextlib.nullcontext(), contextlib.nullcontext

    monkeypatch.setattr(Runtime, "recompute_contexts", first_pass_only)
    report = run(precision="mxfp8")
    assert {"recompute_parity", "coverage"} <= red(report)
    assert report["exit_code"] == 1
    assert "linear_q_up_proj" in finding(report, "coverage")["where"]
    assert "step 0" in finding(report, "recompute_parity")["where"]


def test_replay_with_the_scale_of_a_later_update(run, monkeypatch):
    """The tape holds views of the live scales instead of copies, so the replay sees what the next update wrote."""
    recorded = Runtime.forward_scale

    def aliased(runtime, slot, x):
        scale = recorded(runtime, slot, x)
        mode = runtime.modes[-1]
        if mode.tape is not None and not mode.replay:
            mode.tape[-1] = runtime.forward_state.scale[slot]
        return scale

    monkeypatch.setattr(Runtime, "forward_scale", aliased)
    report = run(precision="fp8-delayed")
    assert red(report) == {"recompute_parity"}
    assert finding(report, "recompute_parity")["where"]


def test_amax_recorded_again_by_the_replay(run, monkeypatch):
    """The replay records its amax, twice as large, into the live history: the scales of later steps differ."""
    original = Runtime.forward_scale

    def recording(runtime, slot, x):
        scale = original(runtime, slot, x)
        if runtime.modes[-1].replay:
            runtime.forward_state.record(slot, 2 * x.detach().abs().amax().float())
        return scale

    monkeypatch.setattr(Runtime, "forward_scale", recording)
    report = run(precision="fp8-delayed")
    assert "recompute_parity" in red(report)


@pytest.mark.parametrize("precision", ["mxfp8", "fp8-delayed"])
def test_conversion_that_matches_nothing(run, monkeypatch, precision):
    monkeypatch.setattr(EmulatedPrecision, "_convert", lambda plugin, name, leaf, slot: leaf)
    report = run(precision=precision, steps=7)
    assert {"coverage", "quantization_engaged"} <= red(report)
    assert report["exit_code"] == 1


def test_e5m2_gradients_under_mxfp8(run, monkeypatch):
    original = EmulatedPrecision.__init__

    def wrong_format(plugin, *args, **kwargs):
        original(plugin, *args, **kwargs)
        plugin.specs = {**plugin.specs, "dy": dataclasses.replace(plugin.specs["dy"], format=Format.E5M2)}

    monkeypatch.setattr(EmulatedPrecision, "__init__", wrong_format)
    report = run(precision="mxfp8")
    assert "quantizer" in red(report)
    assert "dy" in finding(report, "quantizer")["where"]


def test_nan_that_nvfp4_would_hide(run, monkeypatch):
    """A NaN enters a quantized leaf; the cast turns it into 6, so only a look before it can see it."""
    from smoke.model.mla import MLASelfAttention

    down = MLASelfAttention._down

    def poisoned(attention, hidden_TH):
        if attention.training and torch.is_grad_enabled() and hidden_TH.dtype is torch.bfloat16:
            spoiled = torch.zeros_like(hidden_TH)
            spoiled[3, 5] = float("nan")
            hidden_TH = hidden_TH + spoiled
        return down(attention, hidden_TH)

    monkeypatch.setattr(MLASelfAttention, "_down", poisoned)
    report = run(precision="nvfp4", policy=PolicyConfig(last_layers_bf16=0))
    assert "finite" in red(report)
    assert "self_attention" in finding(report, "finite")["where"]


def test_batch_whose_every_label_is_ignored(run, monkeypatch):
    loss = SmokeModule.loss

    def without_labels(module, batch):
        return loss(module, {**batch, "labels": torch.full_like(batch["labels"], -100)})

    monkeypatch.setattr(SmokeModule, "loss", without_labels)
    report = run(precision="mxfp8")
    assert "finite" in red(report)


def test_random_draws_that_differ_between_two_runs(run, monkeypatch):
    """Stochastic rounding that ignores the restored random state: the noise floor is not zero."""
    import smoke.precision.emulated as emulated

    operand, count = emulated.operand, iter(range(10**6))

    def unseeded(x, spec, direction, **kwargs):
        if spec.stochastic:
            kwargs["generator"] = torch.Generator().manual_seed(next(count))
        return operand(x, spec, direction, **kwargs)

    monkeypatch.setattr(emulated, "operand", unseeded)
    report = run(precision="nvfp4", policy=PolicyConfig(last_layers_bf16=0))
    assert {"determinism", "recompute_parity"} <= red(report)
    assert finding(report, "recompute_parity")["status"] == "ERROR"
    assert report["exit_code"] == 3


def test_attention_that_crosses_a_sequence_edge(run, monkeypatch):
    """Packed attention that takes the whole pack for one sequence, positions restarted or not."""
    from smoke.model.attention import Sequences

    original = Sequences.of

    def one_sequence(batch, layout):
        if layout == "thd" and batch["tokens"].numel() > 200:
            edges = batch["cu_seqlens"]
            batch = {**batch, "cu_seqlens": torch.stack([edges[0], edges[-1]])}
        return original(batch, layout)

    monkeypatch.setattr(Sequences, "of", staticmethod(one_sequence))
    report = run(precision="bf16", recompute=(), layout="thd")
    assert "packed_parity" in red(report)
    assert finding(report, "packed_parity")["detail"] == "a sequence sees another one"


def test_leaf_that_never_runs_is_not_covered(run, monkeypatch):
    """The bf16 run whose experts are left out: coverage has no quantized GEMM to judge, and is red all the same."""
    from smoke.model.moe import MoELayer

    def shared_experts_only(layer, x_TH, sequences):
        return layer.shared_experts(x_TH), x_TH.new_zeros((), dtype=torch.float32)

    monkeypatch.setattr(MoELayer, "forward", shared_experts_only)
    report = run(precision="bf16", recompute=())
    assert "coverage" in red(report)
    assert "experts" in finding(report, "coverage")["where"] or "router" in finding(report, "coverage")["where"]
