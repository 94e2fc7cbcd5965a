"""The run folder is always a new one."""

from __future__ import annotations

import datetime
import os
import threading

import pytest

from smoke.config import RunConfig
from smoke.plan import Refusal
from smoke.report import create

NOW = datetime.datetime(2025, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def test_name_is_time_precision_and_recompute_set(tmp_path):
    config = RunConfig(precision="nvfp4", recompute=("mla_up_proj", "moe_act"))
    assert create(config, root=tmp_path / "runs", now=NOW).name == "20250102T030405Z-nvfp4-mla_up_proj+moe_act"
    assert create(RunConfig(), root=tmp_path / "runs", now=NOW).name == "20250102T030405Z-mxfp8-none"


def test_time_is_utc_whatever_the_zone(tmp_path):
    zone = datetime.timezone(datetime.timedelta(hours=9))
    assert create(RunConfig(), root=tmp_path, now=NOW.astimezone(zone)).name.startswith("20250102T030405Z")


def test_runs_of_the_same_second_get_their_own_folders(tmp_path):
    made, start = [], threading.Barrier(8)

    def one() -> None:
        start.wait()
        made.append(create(RunConfig(), root=tmp_path, now=NOW))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8
    assert all(folder.is_dir() for folder in made)


def test_a_hostile_word_does_not_leave_the_root(tmp_path):
    folder = create(RunConfig(precision="../../x\n" + "y" * 300), root=tmp_path, now=NOW)
    assert folder.parent == tmp_path
    assert len(folder.name) <= 120


def test_out_may_be_absent_or_empty(tmp_path):
    absent = tmp_path / "a" / "b"
    assert create(RunConfig(out=str(absent))) == absent
    assert absent.is_dir()
    assert create(RunConfig(out=str(absent))) == absent


@pytest.mark.parametrize(
    "case", ["not empty", "file", "dangling link", "below a file", "no name", "null", "too long", "/proc"]
)
def test_an_out_that_cannot_be_used_is_refused_in_one_line(tmp_path, case):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "report.json").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    out = {
        "not empty": str(tmp_path / "full"),
        "file": str(tmp_path / "full" / "report.json"),
        "dangling link": str(tmp_path / "link"),
        "below a file": str(tmp_path / "full" / "report.json" / "x"),
        "no name": "",
        "null": "a\0b",
        "/proc": "/proc/smoke-run",
        "too long": str(tmp_path / ("x" * 300)),
    }[case]
    with pytest.raises(Refusal) as refusal:
        create(RunConfig(out=out))
    assert refusal.value.exit_code == 2
    assert refusal.value.message.startswith("--out")
    assert "\n" not in refusal.value.message
    assert (tmp_path / "full" / "report.json").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    for out in ("closed", "closed/below"):
        with pytest.raises(Refusal, match="Permission denied"):
            create(RunConfig(out=str(tmp_path / out)))


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(Refusal, match="cannot be written: File exists"):
        create(RunConfig(), root=tmp_path / "runs")
