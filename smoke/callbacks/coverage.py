"""Reads, at the end of training, which GEMMs really ran quantized.

The counting is done by the leaves; this callback only takes their rows at the right moment: when the last step is done,
or when training breaks off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning

from smoke.record import CoverageRow


class Coverage(lightning.Callback):
    """Keeps what ``rows()`` returns at the end of training in ``self.rows``."""

    def __init__(self, rows: Callable[[], list[CoverageRow]]):
        self._read = rows
        self.rows: list[CoverageRow] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.rows = list(self._read())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.rows = list(self._read())
