"""Faults of activation recompute: what a replay must repeat, and what it must leave alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from smoke.config import PolicyConfig
from smoke.faults.fault import Fault, replaced


@contextlib.contextmanager
def replay_in_bf16() -> Iterator[None]:
    from smoke.precision.emulated import Runtime

    def no_contexts(runtime: Any) -> Any:
        return contextlib.nullcontext(), contextlib.nullcontext

    with replaced(Runtime, "recompute_contexts", no_contexts):
        yield


@contextlib.contextmanager
def stale_scale() -> Iterator[None]:
    """The tape holds views of the live scales instead of copies, so the replay sees what the next update wrote."""
    from smoke.precision.emulated import Runtime

    original = Runtime.forward_scale

    def aliased(runtime: Any, slot: int, x: Any) -> Any:
        scale, mode = original(runtime, slot, x), runtime.modes[-1]
        if mode.tape is not None and not mode.replay:
            mode.tape[-1] = runtime.forward_state.scale[slot]
        return scale

    with replaced(Runtime, "forward_scale", aliased):
        yield


@contextlib.contextmanager
def amax_counted_twice() -> Iterator[None]:
    """The replay records its amax, twice as large, into the live history."""
    from smoke.precision.emulated import Runtime

    original = Runtime.forward_scale

    def recording(runtime: Any, slot: int, x: Any) -> Any:
        scale = original(runtime, slot, x)
        if runtime.modes[-1].replay:
            runtime.forward_state.record(slot, 2 * x.detach().abs().amax().float())
        return scale

    with replaced(Runtime, "forward_scale", recording):
        yield


@contextlib.contextmanager
def unrestored_random_state() -> Iterator[None]:
    """A snapshot puts everything back but the random states, from which stochastic rounding draws."""
    from smoke import trajectories

    original = trajectories.Snapshot.restore

    def without_random_states(snapshot: Any, *args: Any) -> None:
        states = trajectories.random_states()
        original(snapshot, *args)
        trajectories.set_random_states(states)

    with replaced(trajectories.Snapshot, "restore", without_random_states):
        yield


@contextlib.contextmanager
def weight_detached_in_region() -> Iterator[None]:
    """Inside a recompute region, and there alone, a leaf multiplies with a copy, which then gets the gradient."""
    from smoke.precision import emulated

    original = emulated.QuantizedLinear.multiply

    def detached(leaf: Any, x_TI: Any) -> Any:
        q = leaf.quantizers
        if q.runtime.modes and q.runtime.modes[-1].tape is not None:
            return emulated._QuantizedProduct.apply(x_TI, [x_TI.shape[0]], [q], leaf.weight.detach().requires_grad_())
        return original(leaf, x_TI)

    with replaced(emulated.QuantizedLinear, "multiply", detached):
        yield


@contextlib.contextmanager
def outputs_kept() -> Iterator[None]:
    """No consumer's saved tensor is recognised as a region's output, so all of them stay."""
    from smoke.model.recompute import _Region

    with replaced(_Region, "recognise", lambda region, tensor: None):
        yield


FAULTS = (
    Fault(
        name="replay-in-bf16",
        row=2,
        summary="the replay runs outside the quantization context, silently in BF16",
        red=("coverage", "recompute_parity"),
        where="linear_q_up_proj",
        changes={"precision": "mxfp8"},
        inject=replay_in_bf16,
    ),
    Fault(
        name="stale-scale",
        row=3,
        summary="the replay takes the scale of a later update (delayed scaling)",
        red=("recompute_parity",),
        where="gradient",
        changes={"precision": "fp8-delayed"},
        inject=stale_scale,
    ),
    Fault(
        name="amax-counted-twice",
        row=4,
        summary="the replay updates the amax history again",
        red=("recompute_parity",),
        where="step",
        changes={"precision": "fp8-delayed"},
        inject=amax_counted_twice,
    ),
    Fault(
        name="random-state-not-restored",
        row=18,
        summary="the random states differ between two compared runs, so there is no noise floor of zero",
        red=("recompute_parity", "determinism"),
        may_follow=(
            "resume_parity",
            "neutrality",
        ),
        where="run twice differs",
        changes={"precision": "nvfp4", "policy": PolicyConfig(last_layers_bf16=0)},
        inject=unrestored_random_state,
    ),
    Fault(
        name="weight-without-gradient",
        row=25,
        summary="a weight inside a recomputed region gets no gradient",
        red=("gradient_presence",),
        may_follow=("recompute_parity", "gradient_parity", "dtype_ledger"),
        where="linear_q_up_proj.weight",
        changes={"precision": "mxfp8"},
        inject=weight_detached_in_region,
    ),
    Fault(
        name="outputs-kept",
        row=0,
        summary="the outputs of a discarding region are kept by their consumers: recompute frees nothing",
        red=("memory",),
        where="mla_up_proj",
        changes={"precision": "mxfp8"},
        inject=outputs_kept,
    ),
)
