"""The process that a command owns, each in a process of its own."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def _process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("code", [0, 3, 130])
def test_the_code_is_the_commands_and_nothing_printed_is_lost(code):
    ended = _process(f"from smoke.process import own\nown(lambda: print('printed', end='') or {code})")
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "printed", "")


def test_exit_handlers_run():
    ended = _process(
        "import atexit\nfrom smoke.process import own\natexit.register(print, 'cleaned up')\nown(lambda: 0)"
    )
    assert (ended.returncode, ended.stdout) == (0, "cleaned up\n")


def test_a_signal_after_the_command_changes_nothing():
    ended = _process(
        "import atexit, os, signal\n"
        "from smoke.process import own\n"
        "atexit.register(lambda: [os.kill(os.getpid(), n) for n in (signal.SIGINT, signal.SIGTERM)])\n"
        "own(lambda: 130)"
    )
    assert (ended.returncode, ended.stderr) == (130, "")


def test_a_crash_of_the_command_is_seen():
    ended = _process("from smoke.process import own\nown(lambda: 1 / 0)")
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr


@pytest.mark.parametrize("command", [["train.py", "--help"], ["-m", "smoke", "--version"]])
def test_every_door_leads_there(command):
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    assert ended.stdout
    assert ended.stderr == ""
