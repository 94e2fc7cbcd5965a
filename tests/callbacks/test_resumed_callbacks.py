"""Every callback through a checkpoint: two runs, the second resumed, leave the state of one run that went on."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from callback_toys import Saver, Toy, fit, make_batches

import smoke.callbacks
from smoke.callbacks import (
    Coverage,
    DtypeLedger,
    Finite,
    GemmCounter,
    GradientParity,
    GradientPresence,
    LossTracker,
    SavedTensors,
    StepLog,
    Throughput,
    WeightFreshness,
    twin_reference,
)
from smoke.callbacks.throughput import ThroughputClosing

STATELESS = {"Checkpoints", "StepLog", "ThroughputClosing"}
"""They write, or belong to another callback, and count nothing that has to go on."""


class _Weights:
    """A backend with one leaf, whose operand is its weight."""

    def __init__(self, module):
        self._module = module

    def modules(self):
        return ["inner"]

    def watch(self, modules):
        self._watched = list(modules)

    def take(self):
        weight = self._module.inner.weight.detach().clone()
        pair = SimpleNamespace(module="inner", parameter="weight", direction="row", used=[weight], fresh=[weight])
        return [pair for _ in self._watched]


def _writes(module):
    """A write in place at a place of its own in each step, and none before training."""
    if module.inner.weight.grad is None:
        return []
    place = f"rope of step {module.trainer.global_step}"
    return [SimpleNamespace(place=place, shape=(2, 3), dtype=torch.float32, saved_version=0, version=1)]


def _callbacks(module: Toy) -> list[lightning.Callback]:
    """One of each, all of which have something to say at every step."""
    counter, seen = GemmCounter(), Counter[str]()
    counter.plan("inner", "e4m3 x e4m3")
    module.inner.register_forward_hook(lambda *_: counter.count("inner", "output", quantized=True))
    module.inner.register_forward_hook(lambda *_: seen.update(["saved"]))
    twin = Toy()
    twin.dropout = torch.nn.Identity()
    loss, throughput = LossTracker(), Throughput(warmup_steps=0)
    return throughput.around(
        [
            loss,
            Finite(),
            GradientPresence(),
            GradientParity(twin_reference(module, twin, Toy.loss), every=2),
            Coverage(counter.rows),
            DtypeLedger(),
            SavedTensors(partial(_writes, module), lambda: seen["saved"]),
            WeightFreshness(_Weights(module), every=1),
            StepLog(loss, throughput, lambda row: None),
        ]
    )


def _trained(steps: int, **options: Any) -> dict[str, Any]:
    """State of each callback after training to ``steps`` on one batch over and over."""
    module = Toy()
    module.dropout = torch.nn.Identity()
    callbacks = _callbacks(module)
    fit(module, make_batches(1) * 6, [*callbacks, Saver(options.pop("save"))], max_steps=steps, **options)
    return {type(callback).__name__: callback.state_dict() for callback in callbacks}


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")  # the batches here start again
def test_resumed_state_is_that_of_a_run_that_went_on(tmp_path):
    whole = _trained(4, save=tmp_path / "unused.ckpt")
    _trained(2, save=tmp_path / "a.ckpt")
    resumed = _trained(4, save=tmp_path / "unused.ckpt", ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    times = whole.pop("Throughput"), resumed.pop("Throughput")
    left, right = ([(step["step"], step["tokens"]) for step in state["steps"]] for state in times)
    assert left == right == [(0, 8), (1, 8), (2, 8), (3, 8)]
    for state in (whole, resumed):
        assert sorted(state["GradientParity"].pop("times_ms")) == [0, 2]
        for name in STATELESS:
            state.pop(name, None)
    assert all(whole.values())
    for name, state in whole.items():
        assert state == resumed[name], name
    assert whole["Coverage"]["rows"][0]["quantized_calls"] == 4
    assert [row["step"] for row in whole["SavedTensors"]["rows"]] == [0, 1, 2, 3]
    assert [row["step"] for row in whole["WeightFreshness"]["rows"]] == [1, 2, 3]
    assert {row["step"] for row in whole["GradientParity"]["rows"]} == {0, 2}


def test_what_is_saved_is_loaded():
    public = [getattr(smoke.callbacks, name) for name in smoke.callbacks.__all__]
    classes = {item for item in public if isinstance(item, type) and issubclass(item, lightning.Callback)}
    assert classes >= {type(callback) for callback in _callbacks(Toy())} - {ThroughputClosing}
    for kind in classes:
        saves = kind.state_dict is not lightning.Callback.state_dict
        assert saves == (kind.load_state_dict is not lightning.Callback.load_state_dict), kind
