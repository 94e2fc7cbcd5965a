"""A run that is interrupted and resumed, once or twice, is the run that never stopped, to the last bit."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_runs import finding, small_config, small_session

from smoke.callbacks.checkpoints import file_name
from smoke.config import DataConfig, PolicyConfig, TrainerConfig
from smoke.environment import detect
from smoke.plan import Refusal, resolve
from smoke.record import Record
from smoke.run.fit import checkpoints, fit, watch
from smoke.run.resume import checkpoint_to_resume, find
from smoke.run.resumed import compare, first_steps, resume_rows
from smoke.trajectories import untouched_random_states

TINY = DataConfig(source="generated", sequence_length=32, micro_batch_size=4)


def _trainer(**options: Any) -> TrainerConfig:
    return TrainerConfig(progress_bar=False, **options)


def _checkpoint(folder: pathlib.Path, steps: int) -> str:
    return str(folder / "checkpoints" / file_name(steps))


def _lines(folder: pathlib.Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith("_ms")} for row in rows]


@pytest.mark.parametrize(("precision", "layout"), [("fp8-delayed", "thd"), ("nvfp4", "sbhd")])
def test_two_resumes_change_no_bit(tmp_path, precision, layout):
    """NVFP4 without BF16 layers, so that stochastic rounding draws everywhere; the other recipes in small runs."""
    with untouched_random_states():
        session = small_session(
            precision=precision, layout=layout, steps=3, data=TINY, policy=PolicyConfig(last_layers_bf16=0)
        )
        fit(session, watch(session, lambda row: None), Record(), behind=[first_steps(tmp_path)])
        rows = resume_rows(session, tmp_path)
    assert {(row.resumes, row.step) for row in rows} == {(1, 1), (2, 2)}
    assert [row for row in rows if row.differing] == []
    parts = {row.part: row.compared for row in rows if row.resumes == 2}
    assert parts["state_dict"] > 50
    assert parts["optimizer_states"] > 3 * 50
    assert parts["callback Coverage"] > 50
    assert {"loops", "callback RandomStates", "callback LossTracker", "callback GradientPresence"} <= parts.keys()
    assert parts["callback LossTracker"] == 3 * 7 + 4


def test_a_resume_without_its_random_states_is_seen(tmp_path, monkeypatch):
    from smoke.callbacks import RandomStates

    monkeypatch.setattr(RandomStates, "load_state_dict", lambda callback, state: None)
    with untouched_random_states():
        session = small_session(precision="nvfp4", steps=3, data=TINY, policy=PolicyConfig(last_layers_bf16=0))
        fit(session, watch(session, lambda row: None), Record(), behind=[first_steps(tmp_path)])
        rows = resume_rows(session, tmp_path)
    assert {"callback RandomStates", "state_dict", "optimizer_states"} <= {row.part for row in rows if row.differing}


def test_what_is_compared():
    whole = {
        "state_dict": {"w": torch.tensor([0.0, float("nan")])},
        "callbacks": {"A": {"rows": [{"step_time_ms": 1}]}},
    }
    resumed = {
        "state_dict": {"w": torch.tensor([-0.0, float("nan")])},
        "callbacks": {"A": {"rows": [{}]}, "B": {"n": 1}},
    }
    found = {row.part: row for row in compare(1, 1, whole, resumed)}
    assert (found["state_dict"].differing, found["state_dict"].first) == (1, "w")
    assert (found["callback B"].first, found["callback B"].whole, found["callback B"].resumed) == ("n", "absent", "1")
    assert compare(1, 1, whole, whole)[0].differing == 0


def test_a_run_resumed_twice_reports_what_one_run_does(run, tmp_path):
    """Through the front door, with accumulation: the second part ends where the first one asked for no more steps."""
    trainer = _trainer(checkpoint_every=1, accumulate_grad_batches=2)
    common: dict[str, Any] = {"precision": "fp8-delayed", "layout": "thd", "data": TINY, "trainer": trainer}
    whole = run("whole", steps=4, **common)
    first = run("first", steps=2, **common)
    second = run("second", steps=3, resume=str(tmp_path / "first"), **common)
    third = run("third", steps=4, resume=_checkpoint(tmp_path / "second", 3), **common)
    assert [report["exit_code"] for report in (whole, first, second, third)] == [0, 0, 0, 0], third["checks"]
    assert _lines(tmp_path / "third") == _lines(tmp_path / "whole")
    assert len(_lines(tmp_path / "second")) == 3
    assert third["summary"]["tokens"] == whole["summary"]["tokens"]
    for name in ("coverage", "gradient_parity", "finite", "gradient_presence"):
        assert finding(third, name) == finding(whole, name)
    left, right = (torch.load(_checkpoint(tmp_path / name, 4), weights_only=True) for name in ("whole", "third"))
    differing = {row.part for row in compare(2, 3, left, right) if row.differing}
    assert differing <= {"callback WeightFreshness"}  # how often it looks depends on --steps
    assert [file.name for file in (tmp_path / "third" / "checkpoints").iterdir()] == [file_name(4)]


def test_no_checkpoint_after_a_number_that_is_not_finite(tmp_path):
    def poison(row: Any) -> None:
        if row.step == 1:
            session.model.layers[0].self_attention.linear_proj.weight.data[0, 0] = float("nan")

    with untouched_random_states():
        trainer = _trainer(checkpoint_every=1)
        session = small_session(precision="bf16", recompute=(), data=TINY, trainer=trainer)
        watched = watch(session, poison)
        (writer,) = checkpoints(session, watched, tmp_path)
        fit(session, watched, Record(), behind=[writer])
    assert writer.refused == "finite is red"
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == [file_name(2)]  # poisoned after its look
    assert writer.written == [pathlib.Path(_checkpoint(tmp_path, 2))]


def test_checkpoints_are_whole_or_absent(tmp_path, monkeypatch):
    import lightning

    def full(trainer: Any, path: pathlib.Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with untouched_random_states():
        session = small_session(precision="bf16", recompute=(), data=TINY, trainer=_trainer(checkpoint_every=2))
        watched = watch(session, lambda row: None)
        monkeypatch.setattr(lightning.Trainer, "save_checkpoint", full)
        with pytest.raises(OSError, match="No space left"):
            fit(session, watched, Record(), behind=checkpoints(session, watched, tmp_path))
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_cannot_be_resumed_is_one_line(tmp_path):
    with untouched_random_states():
        session = small_session(precision="bf16", recompute=(), data=TINY, trainer=_trainer(checkpoint_every=4))
        watched = watch(session, lambda row: None)
        fit(session, watched, Record(), behind=checkpoints(session, watched, tmp_path))
    good = replace(session.plan.config, steps=8, resume=str(tmp_path))
    assert checkpoint_to_resume(good) == find(str(tmp_path)) == pathlib.Path(_checkpoint(tmp_path, 4))
    assert checkpoint_to_resume(replace(good, resume=None)) is None
    foreign, empty = tmp_path / "foreign.ckpt", tmp_path / "empty"
    torch.save({"state_dict": {}}, foreign)
    empty.mkdir()
    malicious = tmp_path / "malicious.ckpt"
    malicious.write_bytes(b"cposix\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "ran").encode())
    for changes, words in (
        ({"steps": 4}, "holds 4 steps already; ask for more than --steps 4"),
        ({"seed": 2}, "its run had --seed 1234, this one has 2"),
        ({"data": replace(TINY, sequence_length=64)}, "--data.sequence_length 32, this one has 64"),
        ({"trainer": _trainer(gradient_clip_val=1.0)}, "--trainer.gradient_clip_val None, this one has 1.0"),
        ({"resume": str(foreign)}, "is no checkpoint of this program"),
        ({"resume": str(malicious)}, "is no checkpoint of this program"),
        ({"resume": str(empty)}, "holds no checkpoints"),
        ({"resume": str(tmp_path / "nowhere")}, "does not exist"),
    ):
        with pytest.raises(Refusal) as refused:
            checkpoint_to_resume(replace(good, **changes))
        assert words in refused.value.message
        assert "\n" not in refused.value.message
        assert refused.value.exit_code == 2
    assert not (tmp_path / "ran").exists()


def test_resume_takes_the_options_of_its_run(tmp_path):
    from smoke.options import UsageError, parse_matrix, parse_run
    from smoke.report import write_config

    config = small_config(precision="nvfp4", layout="thd", steps=7, trainer=_trainer(checkpoint_every=2))
    write_config(tmp_path, resolve(config, detect()).config)
    folder = str(tmp_path)
    assert parse_run(["--resume", folder], "run") == replace(config, resume=folder)
    assert parse_run([f"--resume={folder}", "--steps", "9"], "run") == replace(config, resume=folder, steps=9)
    file = _checkpoint(tmp_path, 2)
    assert parse_run(["--steps", "9", "--resume", file], "run") == replace(config, resume=file, steps=9)
    with pytest.raises(UsageError, match="goes on with one run"):
        parse_matrix(["--resume", folder], "matrix")
