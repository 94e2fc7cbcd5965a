"""The watched training: Lightning's Trainer, the precision plug-in and the callbacks, filling the record."""

from __future__ import annotations

import contextlib
import io
import logging
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from smoke.callbacks import (
    AttentionBackend,
    Checkpoints,
    Coverage,
    DtypeLedger,
    Finite,
    GradientParity,
    GradientPresence,
    LossSum,
    LossTracker,
    Neutrality,
    RandomStates,
    SavedTensors,
    StepLog,
    Throughput,
    WeightFreshness,
)
from smoke.data.module import WORKERS_WARNING, batch_sha256
from smoke.model.linear import GroupedLinear, HeadwiseLinear, Linear
from smoke.model.routing import RoutingTape, record_routing
from smoke.module import MasterAdamW
from smoke.precision.weights import MultipliedWeights
from smoke.record import Record, StepRow
from smoke.run import resume
from smoke.run.attention import attention_rows, forget_kernels
from smoke.run.idle import Idle
from smoke.run.loss_sum import attach_sums, combine_sums
from smoke.run.session import Session
from smoke.trajectories import random_states, set_random_states


class RoutingRecorder:
    """``record_routing`` as a pair of calls, which is what a callback's hooks need."""

    def __init__(self) -> None:
        self._stack: contextlib.ExitStack | None = None
        self._tape = RoutingTape()

    def start(self) -> None:
        self._stack = contextlib.ExitStack()
        self._tape = self._stack.enter_context(record_routing())

    def stop(self) -> RoutingTape:
        if self._stack is not None:
            self._stack.close()
            self._stack = None
        return self._tape


@dataclass
class Watch:
    """The callbacks of one run; ``collect`` moves what they hold into the record at any time."""

    loss: LossTracker
    loss_sum: LossSum
    throughput: Throughput
    coverage: Coverage
    gradients: GradientParity
    finite: Finite
    presence: GradientPresence
    freshness: WeightFreshness
    dtypes: DtypeLedger
    saved: SavedTensors
    attention: AttentionBackend
    neutral: Neutrality
    log: StepLog
    recorder: RoutingRecorder

    def callbacks(self) -> list[lightning.Callback]:
        inner = [
            self.loss,
            self.loss_sum,
            self.gradients,
            self.finite,
            self.presence,
            self.freshness,
            self.dtypes,
            self.saved,
            self.attention,
            self.coverage,
        ]
        return [*self.throughput.around(self.neutral.around(inner)), self.log]

    def collect(self, record: Record) -> None:
        record.gradients, record.coverage = list(self.gradients.rows), list(self.coverage.rows)
        record.finite, record.finite_looked = list(self.finite.rows), self.finite.looked
        record.finite_steps, record.finite_kinds = self.finite.steps, tuple(sorted(self.finite.meter.kinds))
        record.presence, record.throughput = self.presence.rows(), self.throughput.summary()
        record.comparison_ms = dict(self.gradients.times_ms)
        record.freshness = list(self.freshness.rows)
        record.dtypes, record.dtype_steps = self.dtypes.rows(), self.dtypes.steps
        record.saved, record.saved_looked, record.saved_steps = self.saved.rows, self.saved.looked, self.saved.steps
        record.attention = list(self.attention.rows)
        record.neutral, record.neutral_looks = list(self.neutral.rows), dict(self.neutral.looks)
        record.watched_losses = tuple(self.neutral.losses[step] for step in sorted(self.neutral.losses))
        record.loss_sums = tuple(self.loss_sum.losses)
        record.tokens, record.mean_loss = self.loss.tokens(), self.loss.mean_loss()


def watch(session: Session, sink: Callable[[StepRow], None]) -> Watch:
    """Make the callbacks of a session; each step's row goes to ``sink`` at once."""
    plan = session.plan
    label = {"emulated": "emulation", "mixed": "emulation"}.get(plan.numerics, plan.numerics)
    loss, throughput = LossTracker(batch_sha256), Throughput(label=label)
    recorder = RoutingRecorder()
    quantized = {name for name, leaf in session.precision.plan.items() if leaf.quantized}
    return Watch(
        loss=loss,
        loss_sum=LossSum(attach_sums, combine_sums(plan.config.model.mtp_loss_weight)),
        throughput=throughput,
        coverage=Coverage(session.precision.coverage),
        gradients=GradientParity(
            session.reference_gradients,
            recorder,
            session.model.gradient_slices(),
            lambda name: name.rpartition(".")[0] in quantized,
            every=plan.config.check.gradient_parity_every,
            first=plan.recipe.warmup_steps,
            prefix="model.",
        ),
        finite=Finite(_leaves, prefix="model."),
        presence=GradientPresence(Idle(session), prefix="model."),
        freshness=WeightFreshness(
            MultipliedWeights(session.precision.runtime, session.model), every=min(8, max(1, plan.config.steps - 1))
        ),
        dtypes=DtypeLedger(_optimizer_states, prefix="model."),
        saved=SavedTensors(session.taken_writes, lambda: session.recompute.watch.looked),
        attention=AttentionBackend(lambda: attention_rows(session), lambda: forget_kernels(session)),
        neutral=Neutrality(),
        log=StepLog(loss, throughput, sink),
        recorder=recorder,
    )


def fit(
    session: Session,
    watched: Watch,
    record: Record,
    *,
    checkpoint: pathlib.Path | None = None,
    behind: Sequence[lightning.Callback] = (),
) -> None:
    """Train, from a checkpoint if one is given; the record is filled also when training breaks off.

    ``behind``: callbacks that stand behind the watching ones.
    """
    with quiet_lightning():
        trainer = make_trainer(session, [*watched.callbacks(), *behind], session.plan.config.steps)
        if session.plan.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        try:
            trainer.fit(session.module, datamodule=session.data, ckpt_path=checkpoint, weights_only=True)
        finally:
            watched.recorder.stop()
            watched.collect(record)


def _optimizer_states(optimizer: MasterAdamW) -> Iterator[tuple[Tensor, str, Tensor]]:
    for parameter, master in optimizer.pairs():
        yield parameter, "master", master
        for value in optimizer.inner.state[master].values():
            yield parameter, "moment", value


class _PlainFiles(TorchCheckpointIO):
    """Writes a checkpoint once, to where it is told. Lightning's own way writes it twice, half a second each time.

    ``Checkpoints`` hands in a temporary file and moves it into place, so nobody sees half a checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        pathlib.Path(path).write_bytes(buffer.getbuffer())


def make_trainer(session: Session, callbacks: Sequence[lightning.Callback], steps: int) -> lightning.Trainer:
    """A Trainer for the session; random states are part of its checkpoints."""
    options = session.plan.config.trainer
    return lightning.Trainer(
        max_steps=steps,
        max_epochs=1,
        min_epochs=0,
        accumulate_grad_batches=options.accumulate_grad_batches,
        gradient_clip_val=options.gradient_clip_val,
        accelerator="gpu" if session.plan.device.startswith("cuda") else "cpu",
        devices=1,
        plugins=[session.precision, _PlainFiles()],
        callbacks=[RandomStates(random_states, set_random_states), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=options.progress_bar and sys.stdout.isatty(),
        num_sanity_val_steps=0,
    )


def checkpoints(session: Session, watched: Watch, folder: pathlib.Path) -> list[Checkpoints]:
    """What writes the checkpoints that the run asks for, if any; none after a red look of ``finite``."""
    config = session.plan.config
    if config.trainer.checkpoint_every is None:
        return []

    def refuse() -> str:
        return "finite is red" if watched.finite.rows else ""

    every, last = config.trainer.checkpoint_every, config.steps
    due = lambda step: step % every == 0 or step == last  # noqa: E731
    return [Checkpoints(folder / resume.FOLDER, due, refuse=refuse, notes=resume.notes(config))]


def _leaves(module: nn.Module) -> dict[str, nn.Module]:
    kinds = (Linear, GroupedLinear, HeadwiseLinear)
    return {name.removeprefix("model."): m for name, m in module.named_modules() if isinstance(m, kinds)}


@contextlib.contextmanager
def quiet_lightning() -> Iterator[Any]:
    """Lightning's banners and its hint about data loader workers say nothing that this run's report does not."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", WORKERS_WARNING)
            # Lightning 2.6 calls a constructor that torch 2.13 deprecates; nothing that this project can change.
            warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
