"""A step without a Trainer is Lightning's, callbacks change nothing, the twin touches nothing: to the last bit."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from small_runs import small_session
from torch import Tensor

from smoke.config import REGIONS, CheckConfig, PolicyConfig, TrainerConfig
from smoke.model.routing import record_routing
from smoke.record import Record
from smoke.run.fit import fit, quiet_lightning, watch
from smoke.run.neutral import watched_losses
from smoke.trajectories import random_states, untouched_random_states

SEED = 11
STEPS = 3
CASES = [("bf16", "sbhd"), ("fp8-delayed", "thd"), ("mxfp8", "sbhd"), ("nvfp4", "thd")]


def _session(precision: str, layout: str, **changes: Any) -> Any:
    """NVFP4 without BF16 layers: its stochastic rounding then shows every random number that is out of place."""
    policy = PolicyConfig(last_layers_bf16=0)
    changes = {"steps": STEPS, "recompute": REGIONS, "policy": policy, **changes}
    return small_session(precision=precision, layout=layout, **changes)


def _state(module: Any) -> dict[str, Tensor]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if left[name].dtype != right[name].dtype or not _same(left[name], right[name])]
    assert not different


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else bool(a == b)


class Keep(lightning.Callback):
    """Keeps losses, gradients and states of every step; seeds torch where the first step begins.

    The seed is set here because Lightning's data loader draws a number of its own before the first step.
    """

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.states: list[dict[str, Tensor]] = []
        self.random_state: Tensor | None = None
        self.shares: list[Tensor] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            torch.manual_seed(SEED)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.keep_gradients(pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.shares.append(outputs["loss"].double())
        if len(self.shares) == trainer.accumulate_grad_batches:
            self.keep_step(pl_module, torch.stack(self.shares).sum())
            self.shares = []

    def keep_gradients(self, module):
        found = {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}
        self.gradients.append(found)

    def keep_step(self, module, loss):
        self.losses.append(loss.detach().clone())
        self.states.append(_state(module))
        self.random_state = torch.get_rng_state()


def _assert_same_training(left: Keep, right: Keep) -> None:
    assert len(left.losses) == len(right.losses) == STEPS
    assert [float(loss) for loss in left.losses] == [float(loss) for loss in right.losses]
    assert len({float(loss) for loss in left.losses}) == STEPS
    for step in range(STEPS):
        _assert_equal(left.gradients[step], right.gradients[step])
        _assert_equal(left.states[step], right.states[step])
    assert left.random_state is not None
    assert right.random_state is not None
    assert torch.equal(left.random_state, right.random_state)


def _without_trainer(session: Any) -> Keep:
    kept = Keep()
    step = session.step(session.optimizer())
    torch.manual_seed(SEED)
    for window in session.windows:
        loss = step(window, lambda: kept.keep_gradients(session.module))
        kept.keep_step(session.module, loss)
    return kept


def _with_trainer(session: Any) -> Keep:
    kept, options = Keep(), session.plan.config.trainer
    with quiet_lightning():
        trainer = lightning.Trainer(
            max_steps=STEPS,
            max_epochs=1,
            accumulate_grad_batches=options.accumulate_grad_batches,
            gradient_clip_val=options.gradient_clip_val,
            accelerator="cpu",
            devices=1,
            plugins=[session.precision],
            callbacks=[kept],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(session.module, datamodule=session.data)
    return kept


@pytest.mark.parametrize(("precision", "layout"), CASES)
def test_train_step_is_lightnings_step(precision, layout):
    with untouched_random_states():
        left, right = _without_trainer(_session(precision, layout)), _with_trainer(_session(precision, layout))
    _assert_same_training(left, right)
    biases = [name for name in left.states[0] if name.endswith("expert_bias")]
    assert len(biases) == 2
    assert all(left.states[-1][name].abs().sum() > 0 for name in biases)


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_train_step_accumulates_and_clips_as_lightning_does(layout):
    """Three is no power of two: dividing by it rounds, and the rounding has to be Lightning's."""
    trainer = TrainerConfig(accumulate_grad_batches=3, gradient_clip_val=0.5, progress_bar=False)
    with untouched_random_states():
        left = _without_trainer(_session("nvfp4", layout, trainer=trainer))
        right = _with_trainer(_session("nvfp4", layout, trainer=trainer))
    _assert_same_training(left, right)


@pytest.mark.parametrize(("precision", "layout"), CASES)
def test_callbacks_change_no_bit(precision, layout):
    check = CheckConfig(gradient_parity_every=1)
    record, rows, kept = Record(), [], Keep()
    with untouched_random_states():
        watched = _session(precision, layout, check=check)
        callbacks = watch(watched, rows.append)
        around = callbacks.callbacks
        callbacks.callbacks = lambda: [kept, *around()]
        fit(watched, callbacks, record)
        plain = _with_trainer(_session(precision, layout))
    _assert_same_training(kept, plain)
    assert [row.loss for row in rows] == [float(loss) for loss in plain.losses]
    assert (len(record.gradients) > 0) == (precision != "fp8-delayed")  # its scales are still warming up
    assert record.finite_steps == STEPS
    assert record.coverage
    assert record.presence
    assert record.throughput


@pytest.mark.parametrize("precision", ["bf16", "fp8-delayed", "nvfp4"])
def test_the_reference_leaves_the_live_module_alone(precision):
    with untouched_random_states():
        session = _session(precision, "sbhd")
        batch = session.batches[0]
        with record_routing() as tape, session.precision.forward_context():
            session.module.loss(batch).backward()
        gradients = {name: p.grad for name, p in session.module.named_parameters()}
        copies = {name: grad.clone() for name, grad in gradients.items() if grad is not None}
        before, calls, states = _state(session.module), session.precision.runtime.calls.copy(), random_states()
        references = [session.reference_gradients(batch, routing) for routing in (tape, None)]
        assert torch.equal(random_states()[0], states[0])
        assert random_states()[2] == states[2]
    assert all(p.grad is gradients[name] for name, p in session.module.named_parameters())
    _assert_equal({name: grad for name, grad in gradients.items() if grad is not None}, copies)
    _assert_equal(_state(session.module), before)
    assert session.precision.runtime.calls == calls
    assert all(p.device.type == "meta" for p in session.twin.parameters())
    owners = {p.data_ptr() for p in session.module.parameters()}
    owners |= {grad.data_ptr() for grad in gradients.values() if grad is not None}
    for found in references:
        assert found.keys() <= {name for name, _ in session.model.named_parameters()}
        assert len(found) > 20
        assert not owners & {grad.data_ptr() for grad in found.values()}
        assert all(grad.isfinite().all() for grad in found.values())


@pytest.mark.parametrize("precision", ["fp8-delayed", "nvfp4"])
def test_the_first_steps_with_callbacks_put_everything_back(precision):
    with untouched_random_states():
        session = _session(precision, "sbhd")
        before, states = _state(session.module), random_states()
        losses = watched_losses(session, 2)
        assert torch.equal(random_states()[0], states[0])
        _assert_equal(_state(session.module), before)
        assert not session.precision.runtime.calls
        kept = _without_trainer(session)
    assert len(losses) == 2
    if precision == "fp8-delayed":  # no random number is drawn, so the other test's seed does not matter
        assert [float.fromhex(loss) for loss in losses] == [float(loss) for loss in kept.losses[:2]]


def test_the_reference_of_a_bf16_run_is_the_run():
    """Nothing is quantized, so the twin's gradients, routing replayed or free, are the run's own bits."""
    with untouched_random_states():
        session = _session("bf16", "sbhd", recompute=())
        with record_routing() as tape, session.precision.forward_context():
            session.module.loss(session.batches[0]).backward()
        live = {name: p.grad for name, p in session.model.named_parameters() if p.grad is not None}
        for routing in (tape, None):
            _assert_equal(live, session.reference_gradients(session.batches[0], routing))
