"""The first steps once more with all callbacks, where the run itself cannot be compared bit by bit.

On a CPU the watched run repeats to the last bit, and its own first losses are those that the neutrality check compares
with the trajectory that ran without callbacks. On CUDA attention and others choose kernels by speed, and deterministic
ones are slower: so there the first steps are trained here, under Lightning, with callbacks and with deterministic
algorithms, and everything is put back.
"""

from __future__ import annotations

from dataclasses import replace

from smoke.record import Record, StepRow
from smoke.run.fit import fit, watch
from smoke.run.session import Session
from smoke.trajectories import Snapshot, deterministic


def watched_losses(session: Session, steps: int) -> tuple[str, ...]:
    """Losses (exact hex) of the first ``steps`` steps with callbacks; the session is left as it was found."""
    config = session.plan.config
    trainer = replace(config.trainer, progress_bar=False)
    short = replace(session, plan=replace(session.plan, config=replace(config, steps=steps, trainer=trainer)))
    optimizer = session.optimizer()
    snapshot, record = Snapshot.take(session.module, optimizer), Record()

    def nowhere(row: StepRow) -> None:
        """These steps are no part of the run's log."""

    with deterministic():
        fit(short, watch(short, nowhere), record)
    snapshot.restore(session.module, optimizer)
    session.precision.runtime.calls.clear()
    return record.watched_losses
