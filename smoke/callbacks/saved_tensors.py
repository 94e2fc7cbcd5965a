"""Tensors that backward needs and that were written in place after they had been saved, by step and place.

Autograd notices such a write itself, unless saved-tensor hooks are at work (recompute, offloading): then the gradient
is wrong, the forward right, and nothing is said. Whoever owns the hooks compares versions and keeps what it finds; this
callback takes it over after each backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import lightning

from smoke.callbacks.common import rows_to_state
from smoke.record import SavedRow


class Write(Protocol):
    """One write in place, as the owner of the hooks tells it."""

    @property
    def place(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def saved_version(self) -> int: ...
    @property
    def version(self) -> int: ...


class SavedTensors(lightning.Callback):
    """Keeps the first row of each place, before and in training, in ``self.rows``.

    Args:
        take: what was written since the last call; it is forgotten there.
        looked: how many saved tensors were looked at so far, a number that only grows.
    """

    def __init__(self, take: Callable[[], Iterable[Write]], looked: Callable[[], int]):
        self._take, self._looked, self._base = take, looked, 0
        self.rows: list[SavedRow] = []
        self.looked, self.steps = 0, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._base = self._looked() - self.looked
        self._note(None)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._note(trainer.global_step)
        self.looked = self._looked() - self._base
        self.steps += 1

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._note(trainer.global_step)

    def _note(self, step: int | None) -> None:
        known = {(row.place, row.shape, row.step is None) for row in self.rows}
        for write in self._take():
            key = (write.place, write.shape, step is None)
            if key not in known:
                known.add(key)
                self.rows.append(
                    SavedRow(
                        step=step,
                        place=write.place,
                        shape=write.shape,
                        dtype=str(write.dtype).removeprefix("torch."),
                        saved_version=write.saved_version,
                        version=write.version,
                    )
                )

    def state_dict(self) -> dict[str, Any]:
        return {"rows": rows_to_state(self.rows), "looked": self.looked, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [SavedRow(**{**row, "shape": tuple(row["shape"])}) for row in state_dict["rows"]]
        self.looked, self.steps = state_dict["looked"], state_dict["steps"]
