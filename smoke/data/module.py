"""``SmokeData``: the batches of a run, all made beforehand, as a LightningDataModule.

A smoke run takes some tens of batches, so they are built once and kept: the run, its twin and every rerun read the very
same tensors, and a hash of each goes into the record. The DataLoader has no worker process and hands the finished
batches out as they are. It gets a generator of its own, because a DataLoader draws a seed at the start of each epoch
and would move torch's global random state.

This is the only file of the room that imports torch and Lightning.

Shape letters: B rows, S tokens of a row, T tokens of a pack, C sequence edges of a pack (one more than sequences).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from smoke.config import DataConfig
from smoke.data import generated, packing
from smoke.data.sources import DataError, documents, preflight

Batch = dict[str, Tensor]

WORKERS_WARNING = ".*does not have many workers"
"""Start of Lightning's warning about DataLoaders without worker processes; the batches are ready, so ignore it."""


def batch_sha256(batch: Batch) -> str:
    """SHA-256 over names, dtypes, shapes and values (little endian) of a batch; the same on every device."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        array = batch[name].detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


class BatchLoader(DataLoader):
    """Hands out finished batches in order; where it was is part of Lightning's checkpoints."""

    _start = 0
    _position = 0

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self._position, self._start = self._start, 0
        for batch in itertools.islice(super().__iter__(), self._position, None):
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """The next ``iter`` begins there; any later one at the first batch."""
        self._start = self._position = state_dict["position"]


class SmokeData(LightningDataModule):
    """Deterministic batches of one layout, ``accumulate`` of them for each of ``steps`` optimizer steps.

    sbhd: tokens, labels, positions, int64 [B, S]. thd: the same, int64 [T] with T = B * S, and cu_seqlens, int32 [C].
    Labels of -100 count in no loss. The first batches do not depend on ``steps``.

    Where several batches make a step, each also holds mean_counts, float64 [3]: labels, labels with a next one, and
    sequences of the step, each divided by ``accumulate``. A loss that divides its sums by them, instead of by the
    batch's own counts, has the same mean over the step's batches as the loss of one large batch.

    The constructor raises DataError for what needs no reading to be wrong, ``batches`` for the rest. Batches that are
    there already can be handed in; then no source is read.
    """

    def __init__(
        self,
        data: DataConfig,
        *,
        layout: str,
        seed: int,
        steps: int,
        vocab_size: int,
        accumulate: int = 1,
        batches: list[Batch] | None = None,
    ):
        super().__init__()
        if batches is None:
            preflight(data, vocab_size=vocab_size)
        if steps < 1:
            raise DataError(f"--steps {steps}: a run needs a step; the least is 1")
        self.config, self.layout, self.seed, self.steps, self.accumulate = data, layout, seed, steps, accumulate
        self.batch_tokens = data.micro_batch_size * data.sequence_length
        self.source_tokens: int | None = None
        """Tokens that the source holds, separators included; None until the batches are made."""
        self._batches = batches

    @property
    def count(self) -> int:
        """Batches of the run."""
        return self.steps * self.accumulate

    @property
    def entropy_floor(self) -> float | None:
        """Lowest possible mean loss in nats per label, where the source has a known one."""
        return generated.entropy_floor(self.layout) if self.config.source == "generated" else None

    @property
    def epochs(self) -> float | None:
        """How many times the run goes through its source (rounding and dropped tails aside)."""
        return None if self.source_tokens is None else self.count * self.batch_tokens / self.source_tokens

    def batches(self) -> list[Batch]:
        """The batches, on the CPU; made at the first call, then the same list. Raises DataError."""
        if self._batches is None:
            arrays = list(itertools.islice(self._arrays(), self.count))
            if self.accumulate > 1:
                _add_mean_counts(arrays, self.accumulate)
            self._batches = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in arrays]
        return self._batches

    def setup(self, stage: str | None = None) -> None:
        """Lightning's hook: make the batches."""
        self.batches()

    def train_dataloader(self) -> BatchLoader:
        """The batches in order, one epoch."""
        batches = cast("Dataset[Batch]", self.batches())
        return BatchLoader(batches, batch_size=None, num_workers=0, generator=torch.Generator())

    def _arrays(self) -> Iterator[dict[str, np.ndarray]]:
        # Twice what is needed: packs drop a third at most, and a generated source is then never read again.
        found = documents(self.config, seed=self.seed, tokens=2 * self.count * self.batch_tokens + 1)
        self.source_tokens = sum(map(len, found))
        return self._packs(found) if self.layout == "thd" else self._rows(found)

    def _order(self, count: int) -> Iterator[int]:
        """Generated documents are independent draws already: kept in order, a longer run begins as a shorter one."""
        return packing.visits(count, seed=self.seed, shuffle=self.config.source != "generated")

    def _rows(self, found: list[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        stream, length = np.concatenate(found), self.config.sequence_length
        count = packing.row_count(len(stream), length)
        if count < self.config.micro_batch_size:
            raise self._too_short(len(stream), len(stream))
        rows = packing.rows(stream, self._order(count), length)
        while True:
            yield packing.row_batch(list(itertools.islice(rows, self.config.micro_batch_size)))

    def _packs(self, found: list[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        longest = packing.longest_sequence(self.config.sequence_length, self.batch_tokens)
        pieces = packing.sequences(found, longest=longest, seed=self.seed)
        usable = sum(map(len, pieces))
        if usable <= self.batch_tokens:
            raise self._too_short(usable, 2 * sum(map(len, found)) // 3)
        ordered = (pieces[number] for number in self._order(len(pieces)))
        return map(packing.pack_batch, packing.packs(ordered, self.batch_tokens))

    def _too_short(self, usable: int, surely: int) -> DataError:
        """``surely``: tokens that stay usable in batches of any other size (shorter cuts may drop more)."""
        rows, length = self.config.micro_batch_size, self.config.sequence_length
        problem = f"holds {usable} usable tokens, one batch of {rows} x {length} takes {self.batch_tokens + 1}"
        remedy = "use a larger file"
        if surely > length:
            remedy += f", or --data.micro_batch_size {(surely - 1) // length}"
        elif surely > 2:
            remedy += f", or --data.micro_batch_size 1 --data.sequence_length {surely - 1}"
        return DataError(f"--data.source {self.config.source}: {problem}; {remedy}")


def _add_mean_counts(batches: list[dict[str, np.ndarray]], accumulate: int) -> None:
    for start in range(0, len(batches), accumulate):
        step = batches[start : start + accumulate]
        mean = np.sum([packing.loss_counts(batch) for batch in step], axis=0) / accumulate
        for batch in step:
            batch["mean_counts"] = mean.copy()
