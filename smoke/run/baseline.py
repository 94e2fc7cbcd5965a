"""One run and its baseline file: read before the work, compared after it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from smoke.baseline import compare, file, key
from smoke.plan import Plan
from smoke.record import Record, plain
from smoke.report import write_atomic


class Comparison:
    """Reads the file at once, so that one that cannot be used ends the run before it begins (BaselineError).

    Args:
        plan: the run.
        alone: whether it is the first run of this process: else the process's peak of memory may be another run's.
    """

    def __init__(self, plan: Plan, *, alone: bool):
        self.plan, self.name = plan, plan.config.baseline
        self.peak_comparable = alone or plan.device.startswith("cuda")
        self.entries = None if self.name is None else file.read(self.name)

    def fill(self, record: Record, batches: Sequence[Any]) -> None:
        """Mark the finished run, and put what was recorded beside it."""
        import torch

        from smoke.data.module import batch_sha256

        environment = self.plan.environment
        if environment is None:
            raise ValueError("the plan knows no machine, so the run has no key")
        made = key.key_of(
            self.plan,
            environment,
            data_sha256=key.sha256(map(batch_sha256, batches)),
            threads=torch.get_num_threads(),
        )
        record.mark = compare.mark_of(record, made, peak_comparable=self.peak_comparable)
        if self.name is not None:
            options = key.options_of(plain(self.plan.config))
            record.baseline = compare.rows_of(self.name, self.entries, record.mark, options)


def record_baseline(name: str, record: Record, plan: Plan) -> None:
    """Make a finished run the only entry of a file, and put it beside itself."""
    assert record.mark is not None
    options = key.options_of(plain(plan.config))
    losses = tuple((row.step, row.loss_hex) for row in record.steps)
    entry = file.Entry(
        key=record.mark.key, options=options, reason="the run itself", losses=losses, costs=(record.mark.costs,)
    )
    write_atomic(pathlib.Path(name), file.text_of([entry]))
    record.baseline = compare.rows_of(name, file.read(name), record.mark, options)
