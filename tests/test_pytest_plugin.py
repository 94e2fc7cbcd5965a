"""The pytest plug-in, in processes of its own: smoke's run, a user's own run, wrong words."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from smoke.requirements import CHECKS

ROOT = pathlib.Path(__file__).resolve().parents[1]
ONE_FOR_EACH = """
def test_check(smoke_finding):
    assert smoke_finding.status == "PASS", str(smoke_finding)
"""
SMALL = """
steps: 4
recompute: mla_up_proj
model: {hidden_size: 64, num_hidden_layers: 2, intermediate_size: 64, moe_intermediate_size: 32, num_attention_heads: 2,
  q_lora_rank: 32, kv_lora_rank: 32, qk_nope_head_dim: 32, v_head_dim: 32, n_routed_experts: 4}
data: {source: generated, sequence_length: 64, micro_batch_size: 4}
"""
OWN_RUN = """
import lightning
import pytest
import torch

from smoke.callbacks import Finite, GradientPresence, LossTracker
from smoke.verdict import judge


class Tiny(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return self.used(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="session")
def smoke_run(smoke_precision):
    loss = LossTracker(counts=lambda batch: (len(batch), len(batch)))
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[loss, Finite(), GradientPresence()], **options
    )
    trainer.fit(Tiny(), torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2))
    return judge(trainer.callbacks, precision=smoke_precision)
"""
OWN_TESTS = """
import pytest


@pytest.mark.parametrize("smoke_check", ["finite", "telepathy"])
def test_named(smoke_finding):
    assert smoke_finding.status == "PASS", str(smoke_finding)


def test_whole(smoke_run, smoke_precision):
    smoke_run.require("finite")
    assert (smoke_precision, len(smoke_run.record.steps)) == ("bf16", 3)
"""


def _pytest(folder: pathlib.Path, *args: str) -> subprocess.CompletedProcess[str]:
    """A session that knows the plug-in only by ``-p``, whether or not the package is installed."""
    plugins = ["-p", "no:smoke", "-p", "smoke.pytest_plugin", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-v", "-rs", "-W", "ignore", *args],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


def _outcomes(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\S+::\S+) ([A-Z]+)", text, re.M))


def test_one_test_for_each_check_of_a_run_and_of_your_own(tmp_path):
    for folder in ("theirs", "own"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text(ONE_FOR_EACH, encoding="utf-8")
    (tmp_path / "own" / "conftest.py").write_text(OWN_RUN, encoding="utf-8")
    (tmp_path / "own" / "test_more.py").write_text(OWN_TESTS, encoding="utf-8")
    (tmp_path / "small.yaml").write_text(SMALL, encoding="utf-8")
    done = _pytest(tmp_path, "--smoke-precision", "bfloat16,bf16", "--smoke-config", "small.yaml")
    found = _outcomes(done.stdout)
    theirs = {name: outcome for name, outcome in found.items() if name.startswith("theirs")}
    assert set(theirs) == {f"theirs/test_theirs.py::test_check[bf16-{check}]" for check in CHECKS}, done.stdout
    skipped = {name for name, outcome in theirs.items() if outcome == "SKIPPED"}
    assert {"quantizer", "packed_parity", "loss_tracking"} <= {name[:-1].rpartition("-")[2] for name in skipped}
    assert {outcome for name, outcome in theirs.items() if name not in skipped} == {"PASSED"}
    assert "bf16 quantizes nothing" in done.stdout
    own = {name[:-1].rpartition("-")[2]: outcome for name, outcome in found.items() if "test_own.py" in name}
    assert set(own) == set(CHECKS)
    assert (own.pop("finite"), own.pop("gradient_presence")) == ("PASSED", "FAILED")
    assert set(own.values()) == {"SKIPPED"}
    assert "FAIL gradient_presence: present in 0 of 3 steps" in done.stdout
    assert "coverage was not judged in this run" in done.stdout
    more = {name.partition("::")[2]: outcome for name, outcome in found.items() if "test_more.py" in name}
    named = {name: outcome for name, outcome in more.items() if name.startswith("test_named")}
    assert sorted(named.values()) == ["ERROR", "PASSED"]
    assert "telepathy was not judged; judged are finite, gradient_presence" in done.stdout
    assert more["test_whole[bf16]"] == "PASSED"
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--smoke-precision", "mxfp9"], 4, "--smoke-precision: 'mxfp9' is no precision; the nearest is mxfp8"),
        (["--smoke-precision", ""], 4, "--smoke-precision: '' is no precision"),
        (["--smoke-config", "missing.yaml"], 1, "missing.yaml"),
    ],
)
def test_wrong_words_are_one_line(tmp_path, args, code, message):
    (tmp_path / "test_mine.py").write_text("def test_mine(smoke_run):\n    pass\n", encoding="utf-8")
    done = _pytest(tmp_path, *args)
    assert done.returncode == code, done.stdout + done.stderr
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_the_package_brings_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"smoke": "smoke.pytest_plugin"}
