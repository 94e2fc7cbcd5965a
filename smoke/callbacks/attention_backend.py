"""Reads which kernels ran the core attention of each module in training.

The counting is done where attention is called; this callback forgets what was counted before training, and takes the
rows when the last step is done, or when training breaks off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import lightning

from smoke.callbacks.common import rows_to_state
from smoke.record import AttentionRow


class AttentionBackend(lightning.Callback):
    """Keeps what ``rows()`` returns at the end of training in ``self.rows``, with what a checkpoint brought.

    Args:
        rows: a row for each module and kernel so far.
        forget: sets the counts to zero.
    """

    def __init__(self, rows: Callable[[], Iterable[AttentionRow]], forget: Callable[[], None]):
        self._read, self._forget = rows, forget
        self._before: list[AttentionRow] = []
        self.rows: list[AttentionRow] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._forget()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.rows = self._all()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.rows = self._all()

    def _all(self) -> list[AttentionRow]:
        calls: Counter[AttentionRow] = Counter()
        for row in (*self._before, *self._read()):
            calls[replace(row, calls=0)] += row.calls
        return [replace(row, calls=count) for row, count in calls.items()]

    def state_dict(self) -> dict[str, Any]:
        return {"rows": rows_to_state(self._all())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = [AttentionRow(**row) for row in state_dict["rows"]]
        self.rows = list(self._before)
