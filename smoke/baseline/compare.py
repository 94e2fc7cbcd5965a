"""A run beside the entry of its key: fills the rows that the check ``baseline`` judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smoke.baseline.file import QUANTITIES, Entry
from smoke.baseline.key import FIELDS, HASHES
from smoke.record import Record
from smoke.record.baseline import BaselineRows, CostRow, RunMark

MOST_NAMED = 4
"""Differing options that a reason names."""


def mark_of(record: Record, key: Mapping[str, str], *, peak_comparable: bool) -> RunMark:
    """Key and costs of a run. A process that ran something before has a peak of memory that is not this run's."""
    costs = {
        "tokens_per_s": record.throughput.tokens_per_s if record.throughput else None,
        "peak_gib": record.peak_gib if peak_comparable else None,
        "held_mib": record.held_mib,
    }
    return RunMark(key=key, costs={name: costs[name] for name in QUANTITIES})


def rows_of(file: str, entries: Sequence[Entry] | None, mark: RunMark, options: Mapping[str, str]) -> BaselineRows:
    """The recorded side of the comparison; where no entry has the run's key, why not.

    Args:
        file: name of the baseline file, for the reason.
        entries: of the file; None where it does not exist.
        mark: of the run.
        options: of the run (``smoke.baseline.key.options_of``).
    """
    if not entries:
        missing = "does not exist" if entries is None else "holds no entry"
        return BaselineRows(outside=f"{file} {missing}; smoke baseline update records one")
    for entry in entries:
        if dict(entry.key) == dict(mark.key):
            return BaselineRows(losses=entry.losses, costs=_costs(entry, mark))
    nearest = min(entries, key=lambda entry: len(_different(entry.key, mark.key)))
    return BaselineRows(outside=f"no entry of {file} is of this run; nearest: {_words(nearest, mark, options)}")


def _costs(entry: Entry, mark: RunMark) -> tuple[CostRow, ...]:
    rows = []
    for quantity in QUANTITIES:
        recorded = tuple(value for run in entry.costs if (value := run[quantity]) is not None)
        rows.append(CostRow(quantity=quantity, value=mark.costs[quantity], recorded=recorded))
    return tuple(rows)


def _different(recorded: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return [name for name in FIELDS if recorded[name] != here[name]]


def _words(entry: Entry, mark: RunMark, options: Mapping[str, str]) -> str:
    """What of an entry's key is other here, options by name."""
    found = []
    for name in _different(entry.key, mark.key):
        if name not in HASHES:
            found.append(f"{name} {entry.key[name] or 'none'} recorded, {mark.key[name] or 'none'} here")
    other = sorted(k for k in entry.options.keys() | options.keys() if entry.options.get(k) != options.get(k))
    if entry.key["config"] != mark.key["config"]:
        found += [f"{k} {entry.options.get(k, 'default')} recorded, {options.get(k, 'default')} here" for k in other][
            :MOST_NAMED
        ] or ["other defaults"]
    elif entry.key["data"] != mark.key["data"]:
        found.append("other data")
    return "; ".join(found)
