"""Standard output and error that cannot stop a run, and text that is safe to show on them.

A reader can go away, a disk be full, a stream be closed: ``python train.py | head -1`` closes the pipe after a line,
and a terminal can vanish while a job runs. The report is in files, so the run goes on: from the first failed write,
what is printed is dropped.

Every name and message may come from a file, a path or a command line. ``printable`` makes control characters, marks
that turn the direction of text and unpaired surrogates visible as backslash escapes, so that none reaches a terminal,
an XML parser or an encoder.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


def printable(text: str, encoding: str = "utf-8") -> str:
    """``text`` on one line, with what cannot be shown, or encoded, as backslash escapes."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


class Lasting:
    """A text stream whose writes never raise OSError; ``error`` is the first one, if any."""

    def __init__(self, stream: TextIO | None):
        # A closed descriptor would be given to the next file that is opened; the null device takes its place.
        self._stream: Any = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error is None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Point the descriptor at the null device, which also takes what is still in buffers."""
        self.error = error
        with contextlib.suppress(OSError, ValueError):
            descriptor, null = self._stream.fileno(), os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting() -> Iterator[Lasting]:
    """Both streams as ``Lasting`` inside; yields standard output. What was lost, and why, is said at the end."""
    before = sys.stdout, sys.stderr
    output, errors = Lasting(sys.stdout), Lasting(sys.stderr)
    sys.stdout, sys.stderr = output, errors
    try:
        yield output
    finally:
        output.flush()
        if output.error is not None and not isinstance(output.error, BrokenPipeError):
            errors.write(f"smoke: standard output cannot be written: {output.error.strerror}\n")
        errors.flush()
        sys.stdout, sys.stderr = before
        for stream, own in zip((output, errors), before, strict=True):
            if own is None:
                stream.close()
