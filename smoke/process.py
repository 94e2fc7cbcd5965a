"""A process that runs one command and nothing else: collects garbage rarely, ends at once, and is not torn down.

``python train.py``, ``smoke`` and ``python -m smoke`` end here; ``smoke.cli.main`` is the same command as a function
that leaves the process as it was.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

OBJECTS = 100_000
"""New objects between two collections. The imports make a million that stay: at Python's 700 they cost a second."""


def own(command: Callable[[], int]) -> NoReturn:
    """Run ``command`` and end the process with the code that it returns.

    Exit handlers run; Python does not take apart the modules of torch and Lightning, which is a second of work that
    nobody sees. From the command's end on signals change nothing: the report, and the exit code in it, stand.
    """
    # Torch's threads wait by spinning, which made a step ten times slower on cores that others use too. A third of the
    # default spin costs nothing on free cores. It is read when torch is imported; what the user has set stays.
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")
    gc.set_threshold(OBJECTS, 20, 20)
    code = command()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)
