"""Checkpoints of a run, written by Lightning, from which the run goes on to the last bit.

``Checkpoints`` saves at the end of every so many optimizer steps and keeps the newest file. A file appears under its
name only when it is whole, and the one before is deleted only then, so a run that is interrupted, killed or out of disk
space leaves a checkpoint that can be loaded. None is written once the run has seen a number that is not finite: a NaN
in one weight outlives the run in its checkpoint, and the loss need not show it.

``RandomStates`` keeps the states of the random generators in them, in plain values that load with ``weights_only``.
They are set when the first step begins, after whatever drew while the run was being set up.

Limit: a checkpoint holds whole optimizer steps. The micro-batches of an open one are computed again.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import lightning

SUFFIX = ".ckpt"


def file_name(step: int) -> str:
    """Name of the checkpoint after ``step`` finished steps; names sort as their steps do."""
    return f"step-{step:08}{SUFFIX}"


class Checkpoints(lightning.Callback):
    """Stands behind every other callback, so that all of them have finished the step that is saved.

    Args:
        folder: made when the first checkpoint is written.
        due: whether the state after that many steps is saved; asked once after each step.
        refuse: why none may be written now, or an empty text.
        notes: plain values kept under ``smoke`` in each checkpoint.
        keep_all: keep the older ones too.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        due: Callable[[int], bool],
        *,
        refuse: Callable[[], str] = lambda: "",
        notes: Mapping[str, Any] | None = None,
        keep_all: bool = False,
    ):
        self.written: list[pathlib.Path] = []
        """Those that are there, oldest first."""
        self.refused = ""
        """Why the newest one was not written; empty if it was."""
        self._folder, self._due, self._refuse, self._keep_all = folder, due, refuse, keep_all
        self._notes = dict(notes or {})
        self._stepped = False

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._stepped = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        stepped, self._stepped = self._stepped, False
        if stepped and self._due(trainer.global_step):
            self.refused = self._refuse()
            if not self.refused:
                self._write(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._notes:
            checkpoint["smoke"] = self._notes

    def _write(self, trainer: lightning.Trainer) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / file_name(trainer.global_step)
        temporary = file.with_suffix(".tmp")
        try:
            trainer.save_checkpoint(temporary)
            os.replace(temporary, file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        older, self.written = self.written, [*self.written, file] if self._keep_all else [file]
        if not self._keep_all:
            for one in older:
                one.unlink(missing_ok=True)


class RandomStates(lightning.Callback):
    """Keeps the random states of torch, its CUDA devices, Python and NumPy.

    Args:
        read: returns them as (tensor, list of tensors, Python's, NumPy's).
        write: sets what ``read`` returned.
    """

    def __init__(self, read: Callable[[], tuple[Any, ...]], write: Callable[[tuple[Any, ...]], None]):
        self._read, self._write = read, write
        self._pending: tuple[Any, ...] | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._pending is not None:
            self._write(self._pending)
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        cpu, cuda, python, (kind, keys, *rest) = self._read()
        return {"cpu": cpu, "cuda": list(cuda), "python": python, "numpy": (kind, keys.tolist(), *rest)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        cpu, cuda = state_dict["cpu"].cpu(), [state.cpu() for state in state_dict["cuda"]]
        self._pending = (cpu, cuda, state_dict["python"], state_dict["numpy"])
