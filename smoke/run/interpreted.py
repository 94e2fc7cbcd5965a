"""The Triton kernels of rope on a machine without a GPU: in Triton's CPU interpreter, in a process of its own.

The interpreter is chosen when triton is first imported, hence the process. It is slow (about 10 ms for each program of
a kernel) and rounds narrow types wrongly, so the cases are few and in float32; what it does show is every address: a
mask that lets too much through, an element that is never written, and arithmetic that is not the oracle's. A fault that
is in the program here is put into that process too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import smoke
from smoke.config import ModelConfig
from smoke.faults import active, by_name, injected
from smoke.record import RopeRow

SIZES = ((3, 5, 20),)
"""Heads, copied and rotated columns of the cases without guard elements."""
SECONDS = 300
"""Longer than this and the process is ended."""


def interpreted_rows() -> list[RopeRow]:
    """Rows of the kernels under the interpreter. Raises RuntimeError when the process fails."""
    root = str(pathlib.Path(smoke.__file__).resolve().parents[1])
    code = f"import sys; sys.path.insert(0, {root!r}); from smoke.run.interpreted import main; main({active()!r})"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RuntimeError(f"the Triton kernels failed in the interpreter: {last}")
    return [RopeRow(**json.loads(line)) for line in done.stdout.splitlines()]


def main(fault: str) -> None:
    """In the process: measure, and print one JSON object a row."""
    from smoke.run.rope_kernels import kernel_rows

    with injected(by_name(fault)) if fault else contextlib.nullcontext():
        for row in kernel_rows("triton", "cpu", ModelConfig(), SIZES):
            print(json.dumps(dataclasses.asdict(row)))
