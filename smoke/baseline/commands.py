"""``smoke baseline update``, ``show`` and ``diff``: record finished runs, print what is recorded, compare one with it.

``update`` takes run folders, so what is recorded is what somebody looked at, and several runs of one key give their
costs a spread. It refuses a run that is not green by its absolute checks (the check ``baseline`` itself does not count:
a wanted change of numbers is why one updates), and runs of one key that differ in a bit. Losses that changed replace
the entry and its costs; the same losses add one run to its costs, of which the newest twenty are kept.

On a GPU training uses the fastest kernels, and some add in an order of their own. So new losses are taken there from
two run folders at once, which shows that they repeat.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace

from smoke.baseline.compare import rows_of
from smoke.baseline.file import QUANTITIES, BaselineError, Entry, read, text_of
from smoke.baseline.folder import FinishedRun, finished
from smoke.checks import FAIL, SKIP
from smoke.checks.baseline import MOST_RUNS, UNITS, baseline, loss_differences
from smoke.checks.finding import number
from smoke.output import printable
from smoke.record import Record
from smoke.report import write_atomic

SAME, DIFFERENT, NO_BASELINE = 0, 1, 6
MOST_LINES = 20
"""Differing steps that ``diff`` prints."""


class NotGreen(Exception):
    """A run that may not become a baseline; the message is one line."""


def update(folders: Sequence[str], file: str, reason: str) -> int:
    """Record finished runs. Raises BaselineError (unusable files), NotGreen, OSError (the file cannot be written)."""
    if not reason.strip():
        raise BaselineError("--reason: say why these numbers are right, for whoever reviews the file")
    entries = {_key(entry): entry for entry in read(file) or ()}
    runs = [finished(folder) for folder in folders]
    for run in runs:
        if run.red:
            raise NotGreen(f"{run.folder}: not recorded: {'; '.join(run.red)}")
    _refuse_other_bits(runs)
    told = []
    for run in runs:
        key = tuple(sorted(run.mark.key.items()))
        _refuse_a_single_gpu_run(run, runs, entries.get(key))
        entries[key], words = merged(entries.get(key), run, reason.strip())
        told.append(f"{run.folder}: {words}")
    path = pathlib.Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text_of(entries.values()))
    _print([*told, f"{file}: {len(entries)} entries"])
    return SAME


def merged(old: Entry | None, run: FinishedRun, reason: str) -> tuple[Entry, str]:
    """The entry with one more run in it, and what that changed, in words."""
    losses, costs = tuple((row.step, row.loss_hex) for row in run.steps), dict(run.mark.costs)
    new = Entry(key=run.mark.key, options=run.options, reason=reason, losses=losses, costs=(costs,))
    if old is None:
        return new, "a new entry"
    if old.losses != losses:
        changed = sum(a != b for a, b in zip(old.losses, losses, strict=False)) + abs(len(old.losses) - len(losses))
        return new, f"{changed} of {len(losses)} losses changed"
    if costs in [dict(known) for known in old.costs]:
        return old, "already recorded"
    kept = (*old.costs, costs)[-MOST_RUNS:]
    return replace(new, costs=kept), f"losses as recorded; costs of {len(kept)} runs"


def _refuse_other_bits(runs: Sequence[FinishedRun]) -> None:
    first: dict[tuple[tuple[str, str], ...], FinishedRun] = {}
    for run in runs:
        other = first.setdefault(tuple(sorted(run.mark.key.items())), run)
        for a, b in zip(other.steps, run.steps, strict=True):
            if a.loss_hex != b.loss_hex:
                raise NotGreen(
                    f"{run.folder}: not recorded: differs from {other.folder} from step {a.step} on, so these losses "
                    "do not repeat and no run could be held against them"
                )


def _refuse_a_single_gpu_run(run: FinishedRun, runs: Sequence[FinishedRun], old: Entry | None) -> None:
    losses = tuple((row.step, row.loss_hex) for row in run.steps)
    alone = sum(dict(other.mark.key) == dict(run.mark.key) for other in runs) < 2
    if run.mark.key["features"].startswith("sm_") and alone and (old is None or old.losses != losses):
        raise NotGreen(
            f"{run.folder}: not recorded: name two runs of this configuration; on a GPU only that shows that its "
            "losses repeat"
        )


def show(file: str) -> int:
    """Print every entry."""
    entries = read(file)
    if not entries:
        _print([f"{file}: {'no such file' if entries is None else 'no entry'}"])
        return NO_BASELINE
    for entry in entries:
        options = ", ".join(f"{name} {value}" for name, value in entry.options.items())
        key = ", ".join(f"{k} {v[:12] if k in ('config', 'data') else v}" for k, v in entry.key.items() if v)
        first, last = (float.fromhex(entry.losses[index][1]) for index in (0, -1))
        losses = f"  losses: {len(entry.losses)} steps, {first:.4f} first, {last:.4f} last"
        _print([options, f"  reason: {entry.reason}", f"  key: {key}", losses, *_costs(entry)])
    return SAME


def _costs(entry: Entry) -> Iterable[str]:
    for quantity in QUANTITIES:
        values = [value for run in entry.costs if (value := run[quantity]) is not None]
        if values:
            spread = f" +- {number(statistics.stdev(values))}" if len(values) > 1 else ""
            yield f"  {quantity}: {number(statistics.fmean(values))}{spread} {UNITS[quantity]}, {len(values)} runs"


def diff(folder: str, file: str) -> int:
    """Print how a finished run differs from its entry. 0: not at all; 1: red; 6: no entry has its key."""
    run, entries = finished(folder), read(file)
    known = rows_of(file, entries, run.mark, run.options)
    record = Record(steps=list(run.steps), baseline=known)
    finding = baseline(record, SimpleNamespace(), None)
    if finding.status == SKIP:
        _print([f"{folder}: {finding.detail}"])
        return NO_BASELINE
    recorded, here = dict(known.losses), {row.step: row.loss for row in run.steps}
    differences = list(loss_differences(record, known))
    for step, words in differences[:MOST_LINES]:
        relative = ""
        if step in recorded and step in here:
            there = float.fromhex(recorded[step])
            relative = f" (relative {number(abs(here[step] - there) / abs(there))})" if there else ""
        _print([f"step {step}: {words}{relative}"])
    if len(differences) > MOST_LINES:
        _print([f"and {len(differences) - MOST_LINES} steps more"])
    place = f" ({finding.where})" if finding.where else ""
    _print([f"{finding.status}: {finding.measured}; limit: {finding.limit}{place}"])
    return DIFFERENT if finding.status == FAIL else SAME


def _key(entry: Entry) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(entry.key.items()))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(printable(line))
