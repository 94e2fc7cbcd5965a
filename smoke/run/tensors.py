"""The tensors of a bundle, read as data and held against what the options imply.

The file may come from anybody: it is loaded with ``weights_only``, so that no code runs, and a batch that would index
past the embedding, a table or a sequence is refused before anything computes with it. The state is held against the
model once that is built.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from smoke.config import RunConfig
from smoke.module import IGNORED_LABEL
from smoke.run.bundle import TENSORS, BundleError, Start
from smoke.run.foreign import ForeignError, load_plain
from smoke.run.session import Session


def load_start(folder: pathlib.Path, config: RunConfig) -> Start:
    """State and batches of the bundle in ``folder``, whose options are ``config``. Raises BundleError."""
    file = folder / TENSORS
    try:
        values = load_plain(file)
    except ForeignError as error:
        raise BundleError(f"{file}: {error}") from None
    problem = _problem(values, config)
    if problem:
        raise BundleError(f"{file}: {problem}")
    return Start(**values)


def restore(session: Session, start: Start) -> None:
    """Put the state of a bundle into a new session. Raises BundleError where names, shapes or types do not fit."""
    live = session.module.state_dict(keep_vars=True)
    different = sorted(start.state.keys() ^ live.keys())
    different += [name for name in start.state.keys() & live.keys() if not _alike(start.state[name], live[name])]
    if different:
        raise BundleError(f"{TENSORS}: {different[0]!r:.80} does not fit the model that the options describe")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(start.state[name])


def start_of(session: Session) -> Start:
    """State and batches of a session that has not trained yet."""
    state = {name: tensor.detach().cpu().clone() for name, tensor in session.module.state_dict().items()}
    batches = [{name: tensor.clone() for name, tensor in batch.items()} for batch in session.data.batches()]
    return Start(state=state, batches=batches)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype is b.dtype


def _problem(values: Any, config: RunConfig) -> str:
    """What is wrong with the content of the file; empty where nothing is."""
    if not isinstance(values, dict) or values.keys() != {"state", "batches", "observed"}:
        return "does not hold the state and the batches of a run"
    if not _named_tensors(values["state"]) or not _named_tensors(values["observed"]):
        return "its state holds something else than named tensors"
    batches, count = values["batches"], config.steps * config.trainer.accumulate_grad_batches
    if not isinstance(batches, list) or len(batches) != count:
        return f"does not hold the {count} batches of the run"
    for number, batch in enumerate(batches):
        wrong = _batch_problem(batch, config) if _named_tensors(batch) else "holds something else than named tensors"
        if wrong:
            return f"batch {number}: {wrong}"
    return ""


def _named_tensors(values: Any) -> bool:
    return isinstance(values, dict) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout is torch.strided
        for name, tensor in values.items()
    )


def _batch_problem(batch: Mapping[str, Tensor], config: RunConfig) -> str:
    """Shapes, types and ranges without which a batch indexes past a table or a sequence."""
    rows, length = config.data.micro_batch_size, config.data.sequence_length
    packed, accumulates = config.layout == "thd", config.trainer.accumulate_grad_batches > 1
    wanted = {"tokens", "labels", "positions"}
    wanted |= ({"cu_seqlens"} if packed else set()) | ({"mean_counts"} if accumulates else set())
    if batch.keys() != wanted:
        return f"must hold {', '.join(sorted(wanted))}"
    shape, ids = (rows * length,) if packed else (rows, length), config.model.vocab_size
    ranges = {"tokens": (0, ids), "labels": (IGNORED_LABEL, ids), "positions": (0, rows * length + 1)}
    for name, (least, beyond) in ranges.items():
        tensor = batch[name]
        if tensor.dtype is not torch.int64 or tuple(tensor.shape) != shape:
            return f"{name} must be int64 of shape {list(shape)}"
        if int(tensor.min()) < least or int(tensor.max()) >= beyond:
            return f"{name} must lie from {least} to {beyond - 1}"
    if packed and not _rises(batch["cu_seqlens"], rows * length):
        return "cu_seqlens must be int32 and rise from 0 to the number of tokens"
    if accumulates and (batch["mean_counts"].dtype is not torch.float64 or tuple(batch["mean_counts"].shape) != (3,)):
        return "mean_counts must be three float64 numbers"
    return ""


def _rises(edges: Tensor, tokens: int) -> bool:
    if edges.dtype is not torch.int32 or edges.dim() != 1 or len(edges) < 2:
        return False
    return int(edges[0]) == 0 and int(edges[-1]) == tokens and bool((edges.diff() > 0).all())
