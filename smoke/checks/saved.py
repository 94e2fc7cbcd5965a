"""saved_tensors: nothing that backward needs was written in place after it had been saved."""

from __future__ import annotations

from typing import Any

from smoke.checks.finding import Finding, failed, passed, unable
from smoke.record import Record


def saved_tensors(record: Record, plan: Any, limits: Any) -> Finding:
    """Every saved tensor has the version that it was saved with when backward asks for it."""
    name, limit = "saved_tensors", "no saved tensor written in place before backward used it"
    if record.saved:
        row = next((row for row in record.saved if row.step is not None), record.saved[0])
        when = "before training" if row.step is None else f"step {row.step}"
        detail = f"{row.dtype} {list(row.shape)}, version {row.saved_version} when saved, {row.version} in backward"
        return failed(name, f"{len({row.place for row in record.saved})} places", limit, f"{when} {row.place}", detail)
    if not record.steps or record.saved_looked < 1:
        return unable(name, f"measured nothing: {len(record.steps)} steps, {record.saved_looked} tensors looked at")
    if record.saved_steps < len(record.steps):
        return unable(name, f"looked at {record.saved_steps} of {len(record.steps)} steps")
    return passed(name, f"{record.saved_looked:,} tensors in {record.saved_steps} steps", limit)
