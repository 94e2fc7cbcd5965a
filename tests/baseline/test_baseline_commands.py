"""update, show and diff on run folders; the exit code of a run whose baseline is not of its toolchain; round trip."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from smoke import cli
from smoke.baseline.file import read
from smoke.baseline.key import FIELDS
from smoke.config import RunConfig
from smoke.record import plain

COSTS: dict[str, float | None] = {"tokens_per_s": 800.0, "peak_gib": 1.0, "held_mib": 8.0}


def run_folder(folder: pathlib.Path, losses=(5.5, 5.25, 5.0), **changes: Any) -> str:
    """A folder as a green run of three steps leaves it; ``changes`` are of its report."""
    folder.mkdir()
    report = {
        "verdict": "pass",
        "message": None,
        "config": plain(RunConfig(steps=3)),
        "checks": [{"name": "finite", "status": "PASS", "detail": ""}],
        "baseline": {"key": {name: f"{name} 1" for name in FIELDS}, "costs": COSTS},
        **changes,
    }
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    step = {"grad_norm": 1.0, "tokens": 1, "padded_tokens": 1, "step_time_ms": 1.0, "forward_ms": 1.0}
    rows = [
        {
            **step,
            "backward_ms": 1.0,
            "batch_sha256": "",
            "step": number,
            "loss": None if loss != loss else loss,
            "loss_hex": loss.hex(),
        }
        for number, loss in enumerate(losses)
    ]
    (folder / "steps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(folder)


def costs(tokens_per_s: float, **key: str) -> dict[str, Any]:
    full = {name: key.get(name, f"{name} 1") for name in FIELDS}
    return {"baseline": {"key": full, "costs": {**COSTS, "tokens_per_s": tokens_per_s}}}


@pytest.fixture
def baseline(tmp_path, capsys):
    """``baseline(action, *args)``: exit code, standard output and standard error."""
    file = str(tmp_path / "baseline.json")

    def call(action: str, *args: str) -> tuple[int, str, str]:
        reason = ["--reason", "why"] if action == "update" and "--reason" not in args else []
        code = cli.main(["baseline", action, *args, "--baseline", file, *reason])
        printed = capsys.readouterr()
        assert printed.err.count("\n") <= 1
        return code, printed.out, printed.err

    return call


def test_round_trip(baseline, tmp_path):
    folder = run_folder(tmp_path / "a")
    assert baseline("update", folder)[0] == 0
    code, out, _ = baseline("show")
    assert code == 0
    assert all(word in out for word in ("mxfp8", "why", "3 steps", "torch 1", "800"))
    code, out, _ = baseline("diff", folder)
    assert (code, out.splitlines()[-1].partition(",")[0]) == (0, "PASS: 0 of 3 losses differ")


def test_diff_names_steps_and_ends_in_1(baseline, tmp_path):
    baseline("update", run_folder(tmp_path / "a"))
    code, out, _ = baseline("diff", run_folder(tmp_path / "b", losses=(5.5, 5.2500000001, 5.0)))
    assert code == 1
    assert out.splitlines()[0].startswith("step 1: loss ")
    assert "relative 1.9e-11" in out
    assert "1 of 3 losses differ" in out


def test_another_toolchain_ends_in_6(baseline, tmp_path):
    here = run_folder(tmp_path / "a", **costs(800, torch="2.12.0"))
    code, out, _ = baseline("diff", here)
    assert code == 6
    assert "does not exist" in out
    assert baseline("show")[0] == 6
    baseline("update", run_folder(tmp_path / "b"))
    code, out, _ = baseline("diff", here)
    assert code == 6
    assert "torch torch 1 recorded, 2.12.0 here" in out


def test_the_same_losses_again_add_to_the_costs(baseline, tmp_path):
    file = tmp_path / "baseline.json"
    folders = [run_folder(tmp_path / str(n), **costs(800.0 + n)) for n in range(22)]
    assert baseline("update", *folders[:3])[0] == 0
    assert "already recorded" in baseline("update", folders[1])[1]
    (entry,) = read(file) or ()
    assert [run["tokens_per_s"] for run in entry.costs] == [800, 801, 802]
    baseline("update", *folders)
    (entry,) = read(file) or ()
    assert [run["tokens_per_s"] for run in entry.costs] == [*range(802, 822)]


def test_a_slow_run_is_red_by_three_recorded_ones(baseline, tmp_path):
    baseline("update", *(run_folder(tmp_path / str(n), **costs(800.0 + n)) for n in range(3)))
    code, out, _ = baseline("diff", run_folder(tmp_path / "slow", **costs(400.0)))
    assert code == 1
    assert "FAIL: 0 of 3 losses differ, 400 tokens/s" in out
    assert "(tokens_per_s)" in out


def test_changed_losses_replace_the_entry_with_its_costs(baseline, tmp_path):
    baseline("update", *(run_folder(tmp_path / str(n), **costs(800.0 + n)) for n in range(3)))
    changed = run_folder(tmp_path / "c", losses=(5.5, 5.0, 4.5))
    assert "2 of 3 losses changed" in baseline("update", changed, "--reason", "new rounding")[1]
    (entry,) = read(tmp_path / "baseline.json") or ()
    assert (entry.reason, len(entry.costs), entry.losses[2][1]) == ("new rounding", 1, (4.5).hex())


def test_other_keys_stay(baseline, tmp_path):
    baseline("update", run_folder(tmp_path / "a"), run_folder(tmp_path / "b", **costs(700, torch="3")))
    baseline("update", run_folder(tmp_path / "c", losses=(4.0, 3.0, 2.0)))
    found = {entry.key["torch"]: entry.losses[0][1] for entry in read(tmp_path / "baseline.json") or ()}
    assert found == {"torch 1": (4.0).hex(), "3": (5.5).hex()}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"verdict": "fail", "checks": [{"name": "finite", "status": "FAIL"}]}, "finite is FAIL"),
        ({"verdict": "error", "checks": [{"name": "finite", "status": "ERROR"}]}, "finite is ERROR"),
        ({"verdict": "error", "message": "RuntimeError: x"}, "its verdict is error"),
        ({"verdict": "interrupted", "message": "stopped by SIGINT"}, "its verdict is interrupted"),
        ({"verdict": "fail"}, "its verdict is fail"),
        ({"checks": []}, "no check passed"),
        ({"checks": None}, "no list of checks"),
        ({"checks": [{"name": "finite", "status": "SKIP", "detail": "x"}]}, "no check passed"),
        (
            {"verdict": "unsupported", "checks": [
                {"name": "finite", "status": "PASS"}, {"name": "memory", "status": "SKIP", "detail": "--check.skip"},
            ]},
            "memory is SKIP",
        ),
        ({"config": plain(RunConfig(steps=4))}, "a step is missing"),
        ({"losses": (5.5, float("nan"), 5.0)}, "the loss of step 1 is nan"),
    ],
)  # fmt: skip
def test_a_run_that_is_not_green_is_not_recorded(baseline, tmp_path, changes, named):
    code, out, err = baseline("update", run_folder(tmp_path / "a", **changes))
    assert (code, out) == (1, "")
    assert named in err
    assert read(tmp_path / "baseline.json") is None


def test_a_red_baseline_is_what_an_update_is_for(baseline, tmp_path):
    baseline("update", run_folder(tmp_path / "a"))
    checks = [{"name": "finite", "status": "PASS"}, {"name": "baseline", "status": "FAIL"}]
    red = run_folder(tmp_path / "b", losses=(5.0, 4.0, 3.0), verdict="fail", checks=checks)
    assert baseline("update", red)[0] == 0


def test_one_red_run_of_several_records_none(baseline, tmp_path):
    folders = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", checks=[])]
    assert baseline("update", *folders)[0] == 1
    assert read(tmp_path / "baseline.json") is None


def test_a_gpu_shows_by_two_runs_that_its_losses_repeat(baseline, tmp_path):
    folders = [run_folder(tmp_path / str(n), **costs(800.0 + n, features="sm_90")) for n in range(3)]
    code, _, err = baseline("update", folders[0])
    assert (code, "name two runs" in err) == (1, True)
    assert baseline("update", *folders[:2])[0] == 0
    assert baseline("update", folders[2])[0] == 0
    other = run_folder(tmp_path / "other", losses=(5.0, 4.0, 3.0), **costs(800.0, features="sm_90"))
    assert baseline("update", other)[0] == 1


def test_runs_that_do_not_repeat_are_no_baseline(baseline, tmp_path):
    folders = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", losses=(5.5, 5.25, 4.9))]
    code, _, err = baseline("update", *folders)
    assert code == 1
    assert "differs from" in err
    assert "from step 2 on" in err


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: (folder / "report.json").unlink(), "report.json: No such file"),
        (lambda folder: (folder / "report.json").write_text("[]"), "is no report"),
        (lambda folder: (folder / "report.json").write_text('{"config": {}}'), "tells no key"),
        (lambda folder: (folder / "steps.jsonl").unlink(), "is no file of steps"),
        (lambda folder: (folder / "steps.jsonl").write_text("{}\n"), "line 1: is no step"),
        (lambda folder: (folder / "steps.jsonl").write_text("{\n"), "line 1: is not JSON"),
        (lambda folder: (folder / "steps.jsonl").write_bytes(b"\xff"), "is not UTF-8"),
    ],
)
@pytest.mark.parametrize("action", ["update", "diff"])
def test_what_is_no_run_folder_is_one_line(baseline, tmp_path, action, spoil, named):
    folder = run_folder(tmp_path / "a")
    spoil(pathlib.Path(folder))
    code, _, err = baseline(action, folder)
    assert code == 2
    assert named in err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "name a action"),
        (["updat"], "the nearest is update"),
        (["update"], "folders"),
        (["update", "x", "--reason", " "], "--reason: say why"),
        (["update", "x", "--reason", "y"], "x: is no folder of a run"),
        (["update", "x", "--raeson", "y"], "the nearest is --reason"),
        (["diff", "x"], "x: is no folder of a run"),
    ],
)
def test_wrong_usage_is_one_line(args, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["baseline", *args]) == 2
    err = capsys.readouterr().err
    assert named in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("action", ["update", "show", "diff"])
def test_help(action, capsys):
    assert cli.main(["baseline", "--help"]) == 0
    assert action in capsys.readouterr().out
    assert cli.main(["baseline", action, "--help"]) == 0
    assert "--baseline" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    args = ["update", run_folder(tmp_path / "a"), "--reason", "r", "--baseline", str(tmp_path / "file" / "b.json")]
    assert cli.main(["baseline", *args]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_commands_load_neither_torch_nor_lightning(tmp_path):
    args = ["baseline", "update", run_folder(tmp_path / "a"), "--reason", "r", "--baseline", str(tmp_path / "b.json")]
    code = f"import sys, smoke.cli; r = smoke.cli.main({args!r}); print(r, {{'torch', 'lightning'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 set()"
