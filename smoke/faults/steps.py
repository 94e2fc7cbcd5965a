"""Faults of steps and runs made of parts: accumulation, and what a resume loses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from smoke.config import TrainerConfig
from smoke.faults.fault import Fault, replaced


@contextlib.contextmanager
def micro_batch_dropped() -> Iterator[None]:
    from smoke.module import SmokeModule

    backward = SmokeModule.backward

    def all_but_the_second(module: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
        trainer = module.trainer
        if trainer.accumulate_grad_batches == 1 or trainer.fit_loop.epoch_loop.batch_idx != 1:
            backward(module, loss, *args, **kwargs)

    with replaced(SmokeModule, "backward", all_but_the_second):
        yield


@contextlib.contextmanager
def mean_of_means() -> Iterator[None]:
    from smoke.module import SmokeModule

    loss = SmokeModule.loss

    def own_counts(module: Any, batch: Any) -> Any:
        return loss(module, {name: value for name, value in batch.items() if name != "mean_counts"})

    with replaced(SmokeModule, "loss", own_counts):
        yield


@contextlib.contextmanager
def loss_logged_divided() -> Iterator[None]:
    from smoke.callbacks import LossTracker

    track = LossTracker.on_train_batch_end

    def divided(tracker: Any, trainer: Any, *args: Any) -> None:
        track(tracker, SimpleNamespace(accumulate_grad_batches=1), *args)

    with replaced(LossTracker, "on_train_batch_end", divided):
        yield


@contextlib.contextmanager
def callback_state_lost() -> Iterator[None]:
    from smoke.callbacks import LossTracker

    with replaced(LossTracker, "load_state_dict", lambda tracker, state: None):
        yield


@contextlib.contextmanager
def random_states_lost() -> Iterator[None]:
    from smoke.callbacks import RandomStates

    with replaced(RandomStates, "load_state_dict", lambda callback, state: None):
        yield


FAULTS = (
    Fault(
        name="micro-batch-dropped",
        row=14,
        summary="the gradient of one of several accumulated micro-batches is dropped",
        red=("accumulation_parity",),
        where="gradient of",
        changes={"precision": "bf16", "recompute": ()},
        inject=micro_batch_dropped,
    ),
    Fault(
        name="mean-of-means",
        row=14,
        summary="a label of a micro-batch with few labels weighs more than one of a full one",
        red=("accumulation_parity",),
        where="gradient of",
        changes={"precision": "bf16", "recompute": ()},
        inject=mean_of_means,
    ),
    Fault(
        name="loss-logged-divided",
        row=24,
        summary="the loss is logged after the division by the accumulation count",
        red=("loss_tracking",),
        where="step 0",
        changes={
            "precision": "bf16",
            "recompute": (),
            "steps": 10,
            "trainer": TrainerConfig(accumulate_grad_batches=2, progress_bar=False),
        },
        inject=loss_logged_divided,
    ),
    Fault(
        name="callback-state-lost",
        row=22,
        summary="a callback begins anew when a run is resumed",
        red=("resume_parity",),
        where="callback LossTracker",
        changes={"precision": "bf16", "recompute": ()},
        inject=callback_state_lost,
    ),
    Fault(
        name="random-states-lost",
        row=0,
        summary="a resumed run draws other random numbers than the run that never stopped",
        red=("resume_parity",),
        where="RandomStates",
        changes={"precision": "mxfp8"},
        inject=random_states_lost,
    ),
)
