"""Files that are never half there: whole replacements, and a log that grows line by line.

Both hold when the process is interrupted or the disk fills up. They do not survive a power failure: nothing is forced
to the disk.
"""

from __future__ import annotations

import os
import pathlib
from types import TracebackType

from smoke.record import StepRow, json_line


def write_atomic(path: pathlib.Path, text: str) -> None:
    """Write ``text`` beside ``path`` and move it there; on any interruption ``path`` is as it was before. OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class StepWriter:
    """Appends one JSON object a line to a new ``steps.jsonl``, each in one write.

    Whoever reads while it grows takes what ends in a newline: file systems may show a write page by page.

    An instance is the ``sink`` of ``smoke.callbacks.StepLog``. FileExistsError when the file is already there: two runs
    never share one.
    """

    def __init__(self, path: pathlib.Path):
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by close()

    def __call__(self, row: StepRow) -> None:
        """Append one row. OSError, with no part of the line kept, when it does not fit."""
        line = f"{json_line(row)}\n".encode("utf-8", "backslashreplace")
        start = self._file.tell()
        if self._file.write(line) != len(line):
            self._file.truncate(start)
            self._file.seek(start)
            raise OSError(f"{self._file.name}: the disk took only part of a line")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> StepWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
