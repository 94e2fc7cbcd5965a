"""The table of published defects: every row can be matched, and matches nothing else."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest
from packaging.specifiers import SpecifierSet

from smoke.config import REGIONS, ModelConfig, PolicyConfig, RunConfig
from smoke.defects import ABSENT, ASKED, DEFECTS, INSTALLED, MET, affects, blocker, matches
from smoke.environment import PACKAGES, Device, Environment
from smoke.plan import Refusal, resolve

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTHING = Environment(
    python="3.11", platform="Linux", cpu_name="", cpu_flags=(), cpu_count=1, memory_bytes=2**35, packages={}
)
BLACKWELL_DESKTOP = (Device(name="a desktop card", capability=(12, 0), memory_bytes=2**35),)
TWELVE_HEADS = ModelConfig(num_attention_heads=12)


def status(name: str, config: RunConfig | None, environment: Environment = NOTHING, **packages: str) -> str:
    here = dataclasses.replace(environment, packages={n.replace("_", "-"): v for n, v in packages.items()})
    return next(match.status for match in matches(here, config) if match.defect.name == name)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_every_row_is_whole(defect):
    assert defect.package in PACKAGES
    assert list(SpecifierSet(defect.versions))
    assert re.fullmatch(
        r"https://github\.com/\S+/(issues|pull)/\d+|GHSA-\S+|CVE-\d+-\d+(, CVE-\d+-\d+)*", defect.reference
    )
    assert defect.trigger
    assert defect.effect
    assert defect.remedy
    assert "\n" not in "".join((defect.trigger, defect.effect, defect.remedy))


def test_names_are_unique():
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)


@pytest.mark.parametrize(
    ("specifier", "version", "expected"),
    [
        ("<=0.19.2", "0.19.2", True),
        ("<=0.19.2", "0.19.2+local", True),
        ("<=0.19.2", "0.19.3", False),
        ("<=2.13", "2.13.0+cpu", True),
        (">=2.8,<2.20", "2.19.0rc1", True),
        ("<=0.19.2", "", False),
        ("<=0.19.2", "not a version", False),
    ],
)
def test_versions(specifier, version, expected):
    assert affects(specifier, version) is expected


EXAMPLES = {
    "absorbed-mla-refuses-fp8": (RunConfig(recompute=("mla_up_proj",)), RunConfig(), "0.19.2", "0.16.1"),
    "fused-mla-rope-heads": (RunConfig(model=TWELVE_HEADS), RunConfig(), "0.13.0", "0.12.0"),
    "core-attn-replay-in-bf16": (
        RunConfig(recompute=("core_attn",)),
        RunConfig(precision="bf16", recompute=("core_attn",)),
        "0.19.2",
        "0.20",
    ),
    "mtp-replay-drops-gradients": (RunConfig(recompute=REGIONS), RunConfig(recompute=("mlp",)), "0.17.1", "0.18.0"),
    "replay-loses-gradient-scales": (
        RunConfig(precision="fp8-delayed", recompute=("mlp",)),
        RunConfig(precision="fp8-delayed"),
        "1.11.0",
        "1.12.0",
    ),
    "replay-overwrites-scales": (
        RunConfig(precision="fp8-delayed", recompute=("mlp",)),
        RunConfig(recompute=("mlp",)),
        "2.3.0",
        "2.4.0",
    ),
    "checkpoint-runs-code": (RunConfig(resume="a.ckpt"), RunConfig(), "2.9.1", "2.11.0"),
    "mxfp8-e5m2-gradients": (RunConfig(policy=PolicyConfig(gradient_format="e5m2")), RunConfig(), "2.20.2", "1.13.0"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_row_is_met_by_its_trigger_and_its_versions_together(name):
    trigger, harmless, affected, fixed = EXAMPLES[name]
    package = next(defect.package for defect in DEFECTS if defect.name == name).replace("-", "_")
    assert status(name, trigger, **{package: affected}) == MET
    assert status(name, trigger, **{package: fixed}) == ABSENT
    assert status(name, trigger) == ASKED
    assert status(name, harmless, **{package: affected}) == INSTALLED
    assert status(name, harmless) == ABSENT
    assert status(name, None, **{package: affected}) == INSTALLED


def test_nvfp4_on_a_desktop_card_alone():
    card = dataclasses.replace(NOTHING, devices=BLACKWELL_DESKTOP)
    config = RunConfig(precision="nvfp4")
    assert status("nvfp4-gradients-of-zero", config, card, transformer_engine="2.14") == MET
    assert status("nvfp4-gradients-of-zero", config, NOTHING, transformer_engine="2.14") == INSTALLED
    assert status("nvfp4-gradients-of-zero", RunConfig(), card, transformer_engine="2.14") == INSTALLED


@pytest.mark.parametrize(("heads", "trips"), [(1, 0), (2, 0), (3, 1), (24, 1), (96, 1), (128, 0), (192, 1), (256, 0)])
def test_head_counts_that_leave_a_partial_block(heads, trips):
    """Blocks of 1, 2, 4 ... 128 heads; a single block that covers all heads is no partial one."""
    config = RunConfig(model=ModelConfig(num_attention_heads=heads))
    partial = any(heads % block for block in (1, 2, 4, 8, 16, 32, 64, 128) if block <= heads)
    assert partial == bool(trips)
    assert (status("fused-mla-rope-heads", config) == ASKED) == partial


def test_a_met_row_is_a_choice_of_the_plan():
    here = dataclasses.replace(NOTHING, packages={"torch": "2.13.0", "megatron-core": "0.19.2"})
    choices = {c.value: c.reason for c in resolve(RunConfig(model=TWELVE_HEADS), here).choices}
    assert "issues/7103" in choices["fused-mla-rope-heads (megatron-core 0.19.2)"]
    assert not [c for c in resolve(RunConfig(), here).choices if c.choice == "known defect"]


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_a_malicious_release_blocks_every_run(version):
    here = dataclasses.replace(NOTHING, packages={"lightning": version})
    with pytest.raises(Refusal) as caught:
        resolve(RunConfig(precision="no such word"), here)
    assert (caught.value.exit_code, caught.value.verdict) == (5, "blocked")
    assert f"lightning {version}" in caught.value.message
    assert "GHSA-w37p-236h-pfx3" in caught.value.message
    assert "\n" not in caught.value.message
    assert not blocker(dataclasses.replace(NOTHING, packages={"lightning": "2.6.4"}))


BLOCKED = """
import sys
from smoke import cli
from smoke.environment import Environment
cli.facts = lambda: Environment(python="3", platform="", cpu_name="", cpu_flags=(), cpu_count=1, memory_bytes=2**35,
                                packages={"lightning": "2.6.3", "torch": "2.13.0"})
code = cli.main(sys.argv[1:])
sys.exit(9 if {"lightning", "pytorch_lightning", "lightning_fabric"} & set(sys.modules) else code)
"""


@pytest.mark.parametrize("command", ["run", "preflight"])
def test_a_malicious_release_is_named_before_it_is_imported(command, tmp_path):
    words = [command, "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 5, done.stderr
    assert "steals credentials" in done.stdout + done.stderr
