"""Runs interpreted_mla_rope.py in one process of its own: the interpreter is chosen when triton is first imported."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
CHECKS = 23


def test_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    without_workers = ["-o", "addopts=--strict-markers", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *without_workers, str(HERE / "interpreted_mla_rope.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]
    assert f"{CHECKS} passed" in result.stdout
