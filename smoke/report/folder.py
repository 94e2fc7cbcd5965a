"""The run folder: a new one for each run, never one that holds something.

``runs/<UTC>-<precision>-<recompute>`` is made by ``mkdir`` alone, which either makes a folder or says that it exists,
so two runs that start in the same second get two folders. A folder that the user names must be absent or empty. A
folder that cannot be had is a ``Refusal`` of one line.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import re

from smoke.config import RunConfig
from smoke.plan import MISSING, USAGE, Refusal

ROOT = pathlib.Path("runs")
BUNDLE = "bundle"
"""Folder inside a run folder that holds what reproduces a red run."""
NAME_LENGTH = 120
"""Longest name, before a suffix: well under the 255 bytes of common file systems."""


def create(
    config: RunConfig, *, root: pathlib.Path = ROOT, now: datetime.datetime | None = None, words: str = ""
) -> pathlib.Path:
    """Make the folder of a run and return it; ``words`` take the place of precision and recompute in its name.

    Raises Refusal (exit code 2).
    """
    try:
        if config.out is not None:
            return _named(config.out)
        root.mkdir(parents=True, exist_ok=True)
        return _fresh(root, default_name(config, now or datetime.datetime.now(datetime.UTC), words))
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Refusal(USAGE, f"--out {config.out or root}: cannot be written: {reason}") from None


def disk_refusal(folder: pathlib.Path, error: OSError) -> Refusal:
    """What a disk that takes no more makes of a run."""
    return Refusal(MISSING, f"--out {folder}: cannot be written: {error.strerror or error}")


def default_name(config: RunConfig, now: datetime.datetime, words: str = "") -> str:
    """``<UTC>-<precision>-<recompute>``, with anything unusual in the words replaced by ``_``."""
    words = words or f"{config.precision}-{'+'.join(config.recompute) or 'none'}"
    safe = re.sub(r"[^A-Za-z0-9.+_-]", "_", words)
    return f"{now.astimezone(datetime.UTC):%Y%m%dT%H%M%SZ}-{safe}"[:NAME_LENGTH]


def _fresh(root: pathlib.Path, name: str) -> pathlib.Path:
    for count in range(1, 10_000):
        folder = root / (name if count == 1 else f"{name}-{count}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise Refusal(USAGE, f"--out: {root / name} and 9,998 more like it exist; name a folder")


def _named(out: str) -> pathlib.Path:
    folder = pathlib.Path(out)
    if not out:
        raise Refusal(USAGE, "--out: the name is empty; name a folder that does not exist yet")
    if os.path.lexists(folder) and not folder.is_dir():
        raise Refusal(USAGE, f"--out {out}: is a file; name a folder that does not exist yet")
    if folder.is_dir() and any(folder.iterdir()):
        raise Refusal(USAGE, f"--out {out}: is not empty; name a folder that is empty or does not exist yet")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Refusal(USAGE, f"--out {out}: cannot be written: Permission denied")
    return folder
