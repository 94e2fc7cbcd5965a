"""Ctrl-C and SIGTERM, turned into one exception that Lightning does not swallow, so that a report is still written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(BaseException):
    """The process was asked to stop. Not an Exception: nothing on the way may take it for a failure."""

    def __init__(self, signal_number: int):
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


def _raise(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal_number, signal.SIG_IGN)
    raise Interrupted(signal_number)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise ``Interrupted`` inside on SIGINT or SIGTERM, once; a second signal is ignored until the report is written.

    Handlers are put back at the end. Outside the main thread, where Python allows none, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore both signals, for the moments in which a report is written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
