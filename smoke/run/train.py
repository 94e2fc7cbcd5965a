"""The training stage of a run: Lightning's training, its step log and its checkpoints."""

from __future__ import annotations

import pathlib
import tempfile
from dataclasses import replace

from smoke import report as reports
from smoke.record import Record, StepRow
from smoke.report.folder import disk_refusal
from smoke.run import measure
from smoke.run.fit import checkpoints, fit, watch
from smoke.run.resumed import first_steps, resume_rows
from smoke.run.session import Session


def train(folder: pathlib.Path, session: Session, record: Record, checkpoint: pathlib.Path | None) -> None:
    """Train to the end, from a checkpoint if one is given, and fill the record. Refusal when the disk is full."""
    config = session.plan.config
    if config.trainer.checkpoint_every is not None:
        reports.write_config(folder, config)
    with reports.StepWriter(folder / reports.STEPS) as sink:

        def keep(row: StepRow) -> None:
            record.steps.append(row)
            try:
                sink(row)
            except OSError as error:
                raise disk_refusal(folder, error) from None

        watched = watch(session, keep)
        with tempfile.TemporaryDirectory() as beside:
            first = [] if "resume_parity" in session.plan.skipped else [first_steps(pathlib.Path(beside))]
            behind = [*first, *checkpoints(session, watched, folder)]
            fit(session, watched, record, checkpoint=checkpoint, behind=behind)
            if first:
                record.resumed = resume_rows(session, pathlib.Path(beside))
    record.curves = replace(record.curves, run=tuple(row.loss for row in record.steps))
    record.peak_gib = measure.peak_gib(session.plan.device)
