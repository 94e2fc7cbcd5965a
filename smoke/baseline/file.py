"""The baseline file: JSON with one line for each loss, sorted, so that a review in git sees exactly what changed.

The file is reviewed, merged and edited by people, so it is read with suspicion: a leftover conflict marker, a key that
stands twice, a decimal that is not its hexadecimal form, or a device in place of a file is a ``BaselineError`` of one
line. The hexadecimal form is the number; the decimal beside it is for the reader.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smoke.baseline.key import FIELDS
from smoke.checks.baseline import FLOORS, MOST_RUNS

VERSION = "1"
MOST_BYTES = 1 << 25
QUANTITIES = tuple(FLOORS)


class BaselineError(ValueError):
    """A baseline, or the run it is to be made of, cannot be used; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What runs of one key gave."""

    key: Mapping[str, str]
    options: Mapping[str, str]
    """Options for the reader; the key's hash is what counts."""
    reason: str
    """Why it was recorded, in the words of who did."""
    losses: tuple[tuple[int, str], ...]
    """Step and hexadecimal loss."""
    costs: tuple[Mapping[str, float | None], ...] = field(default=())
    """Of each recorded run, oldest first."""


def read(path: str | pathlib.Path) -> tuple[Entry, ...] | None:
    """Entries of a file; None where there is none. Raises BaselineError."""
    name = f"--baseline {path}"
    if not str(path):
        raise BaselineError("--baseline: name a file")
    try:
        if not pathlib.Path(path).exists():
            return None
    except (OSError, ValueError) as error:
        raise BaselineError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    tree = json_of(pathlib.Path(path), name)
    if not isinstance(tree, dict) or tree.get("version") != VERSION or not isinstance(tree.get("entries"), list):
        raise BaselineError(f"{name}: is no baseline file of version {VERSION}")
    entries = tuple(_entry(value, f"{name}: entry {number}") for number, value in enumerate(tree["entries"], 1))
    for number, entry in enumerate(entries, 1):
        if any(dict(entry.key) == dict(other.key) for other in entries[: number - 1]):
            raise BaselineError(f"{name}: entry {number}: its key stands twice")
    return entries


def json_of(path: pathlib.Path, name: str) -> Any:
    """The JSON of a regular file of reasonable size. ``name`` begins the message of a BaselineError."""
    try:
        if path.exists() and not path.is_file():
            raise BaselineError(f"{name}: is not a regular file")
        if path.stat().st_size > MOST_BYTES:
            raise BaselineError(f"{name}: has more than {MOST_BYTES:,} bytes")
        return json_text(path.read_text(encoding="utf-8"), name)
    except OSError as error:
        raise BaselineError(f"{name}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BaselineError(f"{name}: is not UTF-8 text") from None


def json_text(text: str, name: str) -> Any:
    """A JSON text in which no key stands twice and every number is finite. Raises BaselineError."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise BaselineError(f"{name}: is nested too deeply") from None
    except ValueError as error:
        raise BaselineError(f"{name}: is not JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _entry(value: Any, name: str) -> Entry:
    if not isinstance(value, dict) or set(value) != {"key", "options", "reason", "losses", "costs"}:
        raise BaselineError(f"{name}: must hold key, options, reason, losses and costs")
    if not _texts(value["key"]) or set(value["key"]) != set(FIELDS):
        raise BaselineError(f"{name}: its key must hold {', '.join(FIELDS)}, each a text")
    if not _texts(value["options"]) or not isinstance(value["reason"], str) or not value["reason"].strip():
        raise BaselineError(f"{name}: options must be texts, and its reason must say something")
    return Entry(
        key=value["key"],
        options=value["options"],
        reason=value["reason"],
        losses=_losses(value["losses"], name),
        costs=_costs(value["costs"], name),
    )


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _losses(rows: Any, name: str) -> tuple[tuple[int, str], ...]:
    if not isinstance(rows, list) or not rows:
        raise BaselineError(f"{name}: holds no loss")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or row.get("step") != number or isinstance(row["step"], bool):
            raise BaselineError(f"{name}: loss {number} is not of step {number}")
        if set(row) != {"step", "hex", "loss"} or not _is_loss(row["hex"], row["loss"]):
            raise BaselineError(f"{name}: step {number}: hex and loss must be one finite number, got {row}")
    return tuple((row["step"], row["hex"]) for row in rows)


def _is_loss(exact: Any, decimal: Any) -> bool:
    if not isinstance(exact, str) or not _is_number(decimal):
        return False
    try:
        value = float.fromhex(exact)
    except (ValueError, OverflowError):
        return False
    return math.isfinite(value) and value.hex() == exact and value == decimal


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300


def _costs(rows: Any, name: str) -> tuple[Mapping[str, float | None], ...]:
    if not isinstance(rows, list) or len(rows) > MOST_RUNS or not all(map(is_cost, rows)):
        raise BaselineError(f"{name}: costs must be {MOST_RUNS} runs at most, each of {', '.join(QUANTITIES)}")
    return tuple(rows)


def is_cost(row: Any) -> bool:
    """Whether these are the costs of one run: a positive number or null for each quantity."""
    if not isinstance(row, dict) or set(row) != set(QUANTITIES):
        return False
    return all(value is None or (_is_number(value) and value > 0) for value in row.values())


def text_of(entries: Iterable[Entry]) -> str:
    """The file's text: entries in the order of their options, a line for each loss and for each recorded run."""
    ordered = sorted(entries, key=lambda entry: (sorted(entry.options.items()), sorted(entry.key.items())))
    body = ",\n".join(_entry_text(entry) for entry in ordered)
    return f'{{\n "version": "{VERSION}",\n "entries": [\n{body}\n ]\n}}\n'


def _entry_text(entry: Entry) -> str:
    losses = [{"step": step, "hex": exact, "loss": float.fromhex(exact)} for step, exact in entry.losses]
    lines = [
        f'   "key": {_block(entry.key)}',
        f'   "options": {_block(entry.options)}',
        f'   "reason": {json.dumps(entry.reason)}',
        f'   "losses": {_list(losses)}',
        f'   "costs": {_list(entry.costs)}',
    ]
    return "  {\n" + ",\n".join(lines) + "\n  }"


def _block(values: Mapping[str, str]) -> str:
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
    return f"{{\n{lines}\n   }}" if lines else "{}"


def _list(rows: Iterable[Mapping[str, Any]]) -> str:
    lines = ",\n".join(f"    {json.dumps(dict(row), allow_nan=False)}" for row in rows)
    return f"[\n{lines}\n   ]" if lines else "[]"
