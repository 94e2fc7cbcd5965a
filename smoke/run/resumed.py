"""What resume_parity measures: a run that is resumed twice, held against the one that never stopped.

The watched run leaves a checkpoint after each of its first three steps. From the first of them a fresh session, which
shares only the batches, does one step and leaves its own; from that one another session does the next step. Each
checkpoint is compared with the watched run's of the same step, leaf by leaf: weights, masters and moments, amax
histories, router counters, random states, data position, what every callback has gathered, counted calls. Times are
left out, and the notes that a file carries about its run.

On a CUDA device the watched run takes the fastest kernels, which do not repeat their bits; there the run that never
stops is one of three steps, and all of them use deterministic algorithms. So it is where a run was itself resumed with
fewer than three steps to go.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from torch import Tensor

from smoke.callbacks import Checkpoints
from smoke.callbacks.checkpoints import file_name
from smoke.record import ResumeRow
from smoke.run.fit import make_trainer, quiet_lightning, watch
from smoke.run.session import Session, build
from smoke.trajectories import deterministic

STEPS = 3
"""One before the first resume, one behind each of the two."""
TIMES = {"step_time_ms", "forward_ms", "backward_ms", "settled", "times_ms"}
ONCE_A_PROCESS = {"on_fit_start", "on_train_start"}
"""Hooks that a resumed run goes through again; who counts them counts more."""
NOTES = {"smoke", "hparams_name", "pytorch-lightning_version"}


def first_steps(folder: pathlib.Path) -> Checkpoints:
    """Saves after each of the first ``STEPS`` steps."""
    seen = itertools.count()
    return Checkpoints(folder, lambda step: next(seen) < STEPS, keep_all=True)


def resume_rows(session: Session, folder: pathlib.Path) -> list[ResumeRow]:
    """Rows of both resumes. ``folder`` holds what ``first_steps`` saved of the watched run, and takes the rest."""
    on_cuda = session.plan.device.startswith("cuda")
    with deterministic() if on_cuda else contextlib.nullcontext():
        if on_cuda or (session.plan.config.resume is not None and len(list(folder.glob("*.ckpt"))) < STEPS):
            folder = folder / "whole"
            _train(session, None, folder, STEPS)
        whole = sorted(folder.glob("*.ckpt"))
        if len(whole) < STEPS:
            return []
        rows, start = [], whole[0]
        step = int(start.stem.rpartition("-")[2])
        for resumes in (1, 2):
            step += 1
            resumed = folder / f"resumed-{resumes}"
            _train(session, start, resumed, step)
            start = resumed / file_name(step)
            rows += compare(resumes, step - 1, _load(folder / file_name(step)), _load(start))
        return rows


def _train(session: Session, start: pathlib.Path | None, folder: pathlib.Path, steps: int) -> None:
    """Train a session of its own up to ``steps`` steps; random states that it does not set are another run's."""
    own = build(session.plan, session.data, session.batches)
    watched = watch(own, lambda row: None)
    callbacks = [callback for callback in watched.callbacks() if callback is not watched.log]
    torch.manual_seed(session.plan.config.seed + steps)
    with quiet_lightning():
        trainer = make_trainer(own, [*callbacks, first_steps(folder), _StopAt(steps)], session.plan.config.steps)
        trainer.fit(own.module, datamodule=own.data, ckpt_path=start, weights_only=True)


class _StopAt(lightning.Callback):
    """Ends training after so many steps; ``max_steps`` stays that of the whole run, which some callbacks look at."""

    def __init__(self, steps: int):
        self._steps = steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.global_step >= self._steps


def _load(file: pathlib.Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True, mmap=True)


def compare(resumes: int, step: int, whole: dict[str, Any], resumed: dict[str, Any]) -> list[ResumeRow]:
    """One row for each part of two checkpoints after the same step; callbacks are parts of their own."""
    left, right = _parts(whole), _parts(resumed)
    rows = []
    for part in sorted(left.keys() | right.keys()):
        values, others = dict(_leaves(left.get(part))), dict(_leaves(right.get(part)))
        paths = [*values, *(path for path in others if path not in values)]
        differing = [path for path in paths if not _same(values.get(path, ABSENT), others.get(path, ABSENT))]
        first = differing[0] if differing else ""
        rows.append(
            ResumeRow(
                resumes=resumes,
                step=step,
                part=part,
                compared=len(paths),
                differing=len(differing),
                first=first,
                whole=_short(values.get(first, ABSENT)) if differing else "",
                resumed=_short(others.get(first, ABSENT)) if differing else "",
            )
        )
    return rows


ABSENT = "absent"


def _parts(checkpoint: dict[str, Any]) -> dict[str, Any]:
    parts = {name: value for name, value in checkpoint.items() if name not in NOTES}
    callbacks = parts.pop("callbacks", {})
    return parts | {f"callback {name}": state for name, state in callbacks.items()}


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, tensor or plain value) of everything but times. An empty container is a leaf."""
    if isinstance(tree, (dict, list, tuple)) and tree:
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if name not in TIMES | ONCE_A_PROCESS:
                yield from _leaves(value, f"{path}.{name}" if path else str(name))
    elif tree is not None or path:
        yield path, tree


def _same(a: Any, b: Any) -> bool:
    """Equal to the last bit; a NaN equals itself."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(torch.equal(*(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))))
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    return type(a) is type(b) and a == b


def _short(value: Any) -> str:
    if value is ABSENT:
        return ABSENT
    text = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
