"""Neutrality: each thing that a callback can change is named with its step and hook; sound callbacks change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from callback_toys import Toy, fit, make_batches

from smoke.callbacks import Finite, GradientPresence, LossTracker, Neutrality

HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def _meddler(hook: str, act: Callable[[Any], None]) -> lightning.Callback:
    """A callback that acts on the module in one hook of the second step (or before the first)."""
    callback = lightning.Callback()

    def run(trainer, pl_module, *rest):
        if hook in HOOKS[:2] or (trainer.global_step - (hook == HOOKS[-1])) == 1:
            act(pl_module)

    setattr(callback, hook, run)
    return callback


def _train(*callbacks: lightning.Callback, **options: Any) -> Neutrality:
    neutrality, module = Neutrality(), Toy()
    module.register_buffer("load", torch.zeros(3))
    python, numpy = random.getstate(), np.random.get_state()
    grad, deterministic = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    try:
        fit(module, make_batches(4), neutrality.around(list(callbacks)), **options)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_grad_enabled(grad)
        torch.use_deterministic_algorithms(deterministic)
    return neutrality


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
def test_sound_callbacks_change_nothing(options):
    neutrality = _train(LossTracker(), Finite(), GradientPresence(), **options)
    count = options.get("accumulate_grad_batches", 1)
    assert neutrality.rows == []
    assert set(neutrality.looks) == set(HOOKS)
    assert neutrality.looks["on_train_batch_end"] == 4
    assert neutrality.looks["on_before_optimizer_step"] == 4 // count
    assert sorted(neutrality.losses) == list(range(4 // count))


def test_losses_are_those_of_a_training_without_callbacks():
    module = Toy()
    fit(module, make_batches(4), [])
    assert [float.fromhex(loss) for _, loss in sorted(_train().losses.items())] == module.seen


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "torch": (lambda module: torch.rand(1), "random state of torch"),
    "python": (lambda module: random.random(), "random state of Python"),
    "numpy": (lambda module: np.random.random(), "random state of NumPy"),
    "eval": (lambda module: module.dropout.eval(), "train/eval flag of dropout"),
    "grad mode": (lambda module: torch.set_grad_enabled(False), "grad mode"),
    "flag": (lambda module: torch.use_deterministic_algorithms(True), "deterministic algorithms"),
    "weight": (lambda module: module.head.weight.detach().mul_(1.0), "parameter head.weight"),
    "frozen": (lambda module: module.head.weight.requires_grad_(False), "parameter head.weight"),
    "buffer": (lambda module: module.load.add_(1), "buffer load"),
    "buffer past its version": (lambda module: module.load.data.add_(1), "buffer load"),
}


@pytest.mark.filterwarnings("ignore:Found 1 module")  # Lightning's, of eval mode
@pytest.mark.parametrize("hook", ["on_fit_start", "on_before_optimizer_step", "on_train_batch_end"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named_with_its_hook(change, hook):
    act, name = CHANGES[change]
    rows = _train(LossTracker(), _meddler(hook, act)).rows
    assert [(row.hook, row.name) for row in rows] == [(hook, name)]
    assert rows[0].step == (0 if hook == "on_fit_start" else 1)


def test_a_gradient_that_is_written_is_named():
    rows = _train(_meddler("on_after_backward", lambda module: module.inner.weight.grad.mul_(1.0))).rows
    assert [(row.step, row.hook, row.name) for row in rows] == [(1, "on_after_backward", "gradient of inner.weight")]


def test_another_tensor_for_a_gradient_is_named():
    def replace(module):
        module.inner.weight.grad = module.inner.weight.grad.clone()

    rows = _train(_meddler("on_before_optimizer_step", replace)).rows
    assert [row.name for row in rows] == ["gradient of inner.weight"]


def test_half_a_bracket_is_refused():
    neutrality = Neutrality()
    with pytest.raises(ValueError, match="half a bracket"):
        fit(Toy(), make_batches(1), [neutrality])


def test_state_goes_through_a_checkpoint():
    neutrality, other = _train(_meddler("on_train_batch_end", lambda module: torch.rand(1))), Neutrality()
    other.load_state_dict(neutrality.state_dict())
    assert (other.rows, other.looks, other.losses) == (neutrality.rows, neutrality.looks, neutrality.losses)
    assert len(other.rows) == 1
