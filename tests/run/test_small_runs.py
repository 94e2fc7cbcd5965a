"""Small runs from end to end: every recipe and layout, other shapes, and packages that cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from small_runs import ROOT, SMALL, red, statuses, yaml_of

from smoke.config import LAYOUTS, PRECISIONS, REGIONS, DataConfig, PolicyConfig
from smoke.requirements import CHECKS

SHAPES = {
    "no query latent": {"model": replace(SMALL, q_lora_rank=None)},
    "plain": {"model": replace(SMALL, attention_form="plain", kv_up_projection="split")},
    "3 heads": {"model": replace(SMALL, num_attention_heads=3), "policy": PolicyConfig(absorbed_kv="recipe")},
    "5 heads": {"model": replace(SMALL, num_attention_heads=5), "layout": "thd"},
    "1 row": {"data": DataConfig(source="generated", sequence_length=64, micro_batch_size=1)},
    "no experts but shared": {"model": replace(SMALL, first_k_dense_replace=2, num_nextn_predict_layers=0)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_recipe_and_layout_passes(run, precision, layout):
    report = run(precision=precision, layout=layout, recompute=REGIONS, steps=6)
    assert (report["verdict"], report["exit_code"]) == ("pass", 0), report["checks"]
    found = statuses(report)
    assert tuple(found) == CHECKS
    skipped = {name for name, status in found.items() if status == "SKIP"}
    expected = {"loss_tracking", "baseline"} | ({"packed_parity"} if layout == "sbhd" else set())
    expected |= {"quantizer", "quantization_engaged", "weight_freshness"} if precision == "bf16" else set()
    assert skipped == expected
    assert report["numerics"] == ("bf16" if precision == "bf16" else "emulated")


@pytest.mark.parametrize("precision", ["fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes_pass(run, shape, precision):
    report = run(precision=precision, steps=6, **SHAPES[shape])
    assert red(report) == set(), [check for check in report["checks"] if check["name"] in red(report)]
    assert report["exit_code"] == 0


BLOCKED = ("triton", "transformer_engine", "megatron")
BLOCKER = f"""
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            print("blocked", name, file=sys.stderr)
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Blocker())
"""


def test_a_run_without_the_optional_packages(tmp_path):
    """``sitecustomize`` makes three packages unimportable before anything else is imported."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    config = yaml_of(tmp_path / "small.yaml")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    common = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    probe = subprocess.run([sys.executable, "-c", "import triton"], timeout=60, **common)
    assert probe.returncode != 0
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(config), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, timeout=200, **common)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert (report["verdict"], report["exit_code"]) == ("pass", 0)
    assert "Traceback" not in done.stderr
    refused = subprocess.run([*command[:-1], str(tmp_path / "triton"), "--impl", "triton"], timeout=60, **common)
    assert refused.returncode == 4
    assert "triton" in refused.stderr.splitlines()[-1]
