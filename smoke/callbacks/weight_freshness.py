"""Whether the weights that a quantized leaf multiplies are those of this step: no cache was left from an earlier one.

A backend that quantizes a weight once and keeps the result must make it anew after every optimizer step; one that
forgets trains on the weights of step 0, and the loss still falls for a while. After each backward this callback takes
the operands that were multiplied since the batch began (forward, backward and replays), each beside a fresh
quantization of the live Parameter, and counts those that differ in any bit. The optimizer has not run yet, so the
Parameter is still the one that the forward had to use.

Quantizing every weight a second time would cost as much as the emulation itself. So the leaves take turns: each is
looked at in every ``every``-th step, from the first step after an update on. A cache that is never refreshed is found
in the first turn; one that is stale in single steps only may be missed.

The source of the operands is handed in (``smoke.precision.weights.MultipliedWeights`` for the emulation).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import lightning
from torch import Tensor

from smoke.callbacks.common import rows_to_state
from smoke.numerics import first_mismatch
from smoke.record import FreshnessRow


class Pair(Protocol):
    """One weight operand; ``used`` and ``fresh`` are tensors to compare one by one."""

    @property
    def module(self) -> str: ...

    @property
    def parameter(self) -> str: ...

    @property
    def direction(self) -> str: ...

    @property
    def used(self) -> Sequence[Tensor]: ...

    @property
    def fresh(self) -> Sequence[Tensor]: ...


class WeightSource(Protocol):
    """What a backend answers: its quantized leaves, and the operands that the watched ones multiplied."""

    def modules(self) -> Sequence[str]: ...

    def watch(self, modules: Collection[str]) -> None: ...

    def take(self) -> Iterable[Pair]: ...


class WeightFreshness(lightning.Callback):
    """Keeps a row for each step, leaf and direction in ``self.rows``.

    Args:
        source: the backend's answer.
        every: steps after which a leaf is looked at again.
    """

    def __init__(self, source: WeightSource, *, every: int = 8):
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.rows: list[FreshnessRow] = []
        self._source, self._every = source, every

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        updates = trainer.global_step
        self._source.watch(self._source.modules()[(updates - 1) % self._every :: self._every] if updates else ())

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pairs: dict[tuple[str, str], list[Pair]] = {}
        for pair in self._source.take():
            pairs.setdefault((pair.module, pair.direction), []).append(pair)
        self.rows += [_row(trainer.global_step, *key, found) for key, found in pairs.items()]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._source.watch(())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._source.watch(())

    def state_dict(self) -> dict[str, Any]:
        return {"rows": rows_to_state(self.rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [FreshnessRow(**row) for row in state_dict["rows"]]


def _row(step: int, module: str, direction: str, pairs: Sequence[Pair]) -> FreshnessRow:
    """Counts over all operands of one leaf, and the place of the first difference."""
    stale, place = 0, ("", "", "")
    for pair in pairs:
        difference = _difference(pair)
        if difference is not None:
            place = place if stale else (pair.parameter, *difference)
            stale += 1
    return FreshnessRow(
        step=step,
        module=module,
        direction=direction,
        operands=len(pairs),
        elements=sum(tensor.numel() for pair in pairs for tensor in pair.used),
        stale=stale,
        parameter=place[0],
        used_hex=place[1],
        fresh_hex=place[2],
    )


def _difference(pair: Pair) -> tuple[str, str] | None:
    """Bits of the first element that differs, or the number of tensors where that does."""
    if len(pair.used) != len(pair.fresh):
        return f"{len(pair.used)} tensors", f"{len(pair.fresh)} tensors"
    for used, fresh in zip(pair.used, pair.fresh, strict=True):
        if used.shape != fresh.shape or used.dtype != fresh.dtype:
            return f"{tuple(used.shape)} {used.dtype}", f"{tuple(fresh.shape)} {fresh.dtype}"
        found = first_mismatch(used, fresh)
        if found is not None:
            return found[1], found[2]
    return None
