"""Whole files or none, whole lines or none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from smoke.report import StepWriter, write_atomic


def test_write_atomic_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "report.json"
    write_atomic(path, "one")
    write_atomic(path, "two \udcff")
    assert path.read_bytes() == b"two \\udcff"
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, error):
    path = tmp_path / "report.json"
    write_atomic(path, "old")

    def stop(*_):
        raise error

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(error):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_reader_sees_whole_lines_while_training_goes_on(tmp_path, record):
    """What ends in a newline is always a step, and the steps are always in order."""
    path, looks, done = tmp_path / "steps.jsonl", [], threading.Event()

    def read() -> None:
        while not done.is_set():
            looks.append(path.read_bytes().rpartition(b"\n")[0])

    with StepWriter(path) as sink:
        reader = threading.Thread(target=read)
        reader.start()
        for count in range(200):
            sink(record.steps[count % len(record.steps)])
            assert path.read_bytes().count(b"\n") == count + 1
        done.set()
        reader.join()
    assert len(looks) > 1
    expected = [record.steps[count % len(record.steps)].step for count in range(200)]
    for look in looks:
        steps = [json.loads(line)["step"] for line in look.splitlines()]
        assert steps == expected[: len(steps)]


def test_two_runs_never_share_a_file(tmp_path):
    with StepWriter(tmp_path / "steps.jsonl"), pytest.raises(FileExistsError):
        StepWriter(tmp_path / "steps.jsonl")


def test_a_line_that_does_not_fit_is_not_kept_in_part(tmp_path, record):
    class Small:
        name = "steps.jsonl"

        def __init__(self, file):
            self.file = file

        def write(self, data: bytes) -> int:
            return self.file.write(data[:10])

        def __getattr__(self, name):
            return getattr(self.file, name)

    path = tmp_path / "steps.jsonl"
    with StepWriter(path) as sink:
        sink(record.steps[0])
        whole = path.read_bytes()
        sink._file = Small(sink._file)
        with pytest.raises(OSError, match="only part of a line"):
            sink(record.steps[1])
    assert path.read_bytes() == whole


KILLED = """
import sys, pathlib
from smoke.record import StepRow
from smoke.report.files import StepWriter
sink, step = StepWriter(pathlib.Path(sys.argv[1])), 0
while True:
    sink(StepRow(step=step, loss=1.5, loss_hex=(1.5).hex(), grad_norm=1.0, tokens=1, padded_tokens=1, step_time_ms=1.0,
                 forward_ms=1.0, backward_ms=1.0, batch_sha256="0" * 64))
    if step == 50:
        print("ready", flush=True)
    step += 1
"""


def test_a_killed_process_leaves_whole_lines(tmp_path):
    path = tmp_path / "steps.jsonl"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    text = path.read_text()
    assert text.endswith("\n")
    rows = [json.loads(line)["step"] for line in text.splitlines()]
    assert rows == list(range(len(rows)))
    assert len(rows) > 50
