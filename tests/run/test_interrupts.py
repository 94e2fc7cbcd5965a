"""Ctrl-C, SIGTERM and SIGKILL, sent to ``python train.py`` in a process of its own: what is left is whole."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator

import pytest
import yaml
from small_runs import ROOT, yaml_of

from smoke.config import CheckConfig

ENDLESS = 400
"""Steps: far more than fit between the start and a signal."""
ARTIFACTS = {"report.json", "report.html", "report.md", "report.xml", "steps.jsonl", "config.yaml"}


class Running:
    """A training process, its folder, and what it has printed (in a file, so that no pipe can fill up)."""

    def __init__(self, folder: pathlib.Path):
        check = CheckConfig(gradient_parity_every=2, skip=("loss_tracking",))
        config = yaml_of(folder / "small.yaml", steps=ENDLESS, check=check)
        self.out, self._log = folder / "out", folder / "printed"
        command = [sys.executable, str(ROOT / "train.py"), "--config", str(config), "--out", str(self.out)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def printed(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def steps(self) -> list[bytes]:
        file = self.out / "steps.jsonl"
        return file.read_bytes().splitlines(keepends=True) if file.exists() else []

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < end, self.printed()
            time.sleep(0.02)

    def starting(self) -> None:
        """The plan is being printed; torch is not imported yet."""
        self.wait_until(lambda: self.printed() != "")
        assert "data and model: " not in self.printed()

    def measuring(self) -> None:
        self.wait_until(lambda: "quantizers and twin forms: " in self.printed())
        assert "training" not in self.printed()

    def training(self) -> None:
        self.wait_until(lambda: len(self.steps()) >= 2)

    def end(self) -> int:
        return self.process.wait(timeout=60)


@pytest.fixture
def running(tmp_path) -> Iterator[Running]:
    started = Running(tmp_path)
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()


def _whole(folder: pathlib.Path) -> dict:
    """Every artifact is there, parses, and nothing temporary is left. Returns report.json."""
    assert {file.name for file in folder.iterdir()} == ARTIFACTS
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert set(report["artifacts"]) == ARTIFACTS
    lines = (folder / "steps.jsonl").read_bytes()
    assert lines == b"" or lines.endswith(b"\n")
    assert [json.loads(line)["step"] for line in lines.splitlines()] == list(range(lines.count(b"\n")))
    assert ElementTree.parse(folder / "report.xml").getroot() is not None
    assert (folder / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["steps"] == ENDLESS
    assert "interrupted" in (folder / "report.md").read_text(encoding="utf-8")
    return report


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("moment", ["starting", "measuring", "training"])
def test_a_signal_leaves_a_whole_report(running, moment, number, code):
    getattr(running, moment)()
    running.process.send_signal(number)
    assert running.end() == code, running.printed()
    report = _whole(running.out)
    assert (report["verdict"], report["exit_code"]) == ("interrupted", code)
    assert signal.Signals(number).name in report["message"]
    assert (len(running.steps()) >= 2) == (moment == "training")
    assert "interrupted" in running.printed()
    assert "Traceback" not in running.printed()


def test_more_signals_do_not_lose_the_report(running):
    running.training()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        running.process.send_signal(number)
        time.sleep(0.05)
    while running.process.poll() is None and not (running.out / "report.json").exists():
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    while running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
    assert running.end() == 130, running.printed()
    assert _whole(running.out)["exit_code"] == 130


def test_a_killed_run_leaves_whole_lines(running):
    running.training()
    running.process.kill()
    assert running.end() == -signal.SIGKILL
    assert {file.name for file in running.out.iterdir()} == {"steps.jsonl"}
    lines = running.steps()
    assert [json.loads(line)["step"] for line in lines] == list(range(len(lines)))
    assert lines[-1].endswith(b"\n")
