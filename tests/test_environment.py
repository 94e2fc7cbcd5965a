"""Facts about this machine: present, plain, and gathered without side effects."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from smoke import environment
from smoke.config import PRECISIONS
from smoke.environment import Device, detect
from smoke.inventory import print_environment
from smoke.record import plain


@pytest.fixture(scope="module")
def here():
    return detect()


def test_detect_reports_this_process(here):
    import torch

    assert here.packages["torch"] == torch.__version__
    assert here.cuda_available == torch.cuda.is_available()
    assert here.cpu_count >= 1
    assert here.memory_bytes > 2**30
    assert here.cpu_name
    assert here.cpu_has_bf16 == environment.cpu_has_bf16()


def test_the_environment_fits_a_report(here):
    tree = plain(here)
    assert tree["packages"]["torch"] == here.packages["torch"]
    assert isinstance(tree["devices"], list)


def test_a_missing_package_has_a_reason(here):
    assert here.missing("torch") == ""
    without = dataclasses.replace(here, packages={})
    assert without.missing("triton") == "the package triton is not installed"


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (("avx2", "fma"), False),
        (("avx512f", "avx512_bf16"), True),
        (("amx_bf16",), True),
        (("bf16",), True),
        ((), False),
    ],
)
def test_bf16_flags(flags, answer):
    assert environment.has_bf16(flags) is answer


def test_the_printed_table_says_for_each_precision_what_runs_and_why(here):
    hopper = Device(name="NVIDIA H200", capability=(9, 0), memory_bytes=140 * 2**30)
    packages = {"torch": "2.13.0", "triton": "3.9.0", "transformer-engine": "2.20.2"}
    reasons = {"mxfp8": "compute capability 10.0 or higher is required"}
    gpu = dataclasses.replace(
        here, devices=(hopper,), cuda_version="13.0", packages=packages, transformer_engine=reasons
    )
    for machine, words in ((here, ["reference"]), (gpu, ["H200", "9.0", "triton", "10.0 or higher"])):
        stream = io.StringIO()
        print_environment(machine, Console(file=stream, width=240))
        text = stream.getvalue()
        assert all(precision in text for precision in PRECISIONS)
        assert all(word in text for word in [*words, "emulated", machine.packages["torch"], "not installed"])
