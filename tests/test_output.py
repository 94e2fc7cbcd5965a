"""Output that nobody takes: the commands' exit codes, and that nothing raises."""

from __future__ import annotations

import io
import os
import pathlib
import subprocess
import sys

import pytest

from smoke import cli
from smoke.output import Lasting, lasting

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Broken(io.StringIO):
    """A stream without descriptor that fails with one error."""

    def __init__(self, error: OSError):
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


FULL = OSError(28, "No space left on device")


def test_a_failing_stream_raises_once_and_to_itself():
    stream = Lasting(Broken(FULL))
    assert stream.write("abc") == 3
    stream.flush()
    assert stream.write("abc") == 3
    assert stream.error is FULL


def test_streams_are_put_back_and_a_missing_one_is_the_null_device(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    before = sys.stderr
    with lasting():
        print("nowhere")
        assert not sys.stdout.isatty()
    assert (sys.stdout, sys.stderr) == (None, before)


@pytest.mark.parametrize(
    ("error", "args", "code"),
    [
        (FULL, ["explain", "memory"], 3),
        (FULL, ["--version"], 3),
        (BrokenPipeError(32, "Broken pipe"), ["explain", "memory"], 0),
        (FULL, ["explain", "nothing"], 2),
    ],
)
def test_what_only_prints_fails_when_it_cannot_unless_its_reader_left(error, args, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Broken(error))
    assert cli.main(args) == code
    said = capsys.readouterr().err
    assert ("No space left on device" in said) == (error is FULL and code != 2)
    assert "Traceback" not in said


def test_a_run_whose_output_is_lost_keeps_its_own_exit_code(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "run", lambda args, prog: print("line") or 1)
    monkeypatch.setattr(sys, "stdout", Broken(FULL))
    assert cli.main(["run"]) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_under_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "smoke", "explain", "memory"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == "smoke: standard output cannot be written: No space left on device\n"
