"""The Triton kernels compile for Hopper and both Blackwells, with 64-bit addresses, without fused multiply-add."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ARCHITECTURES = ("90", "100", "120")
KERNELS = ("rotate", "rotate_back", "key_value", "key_value_grad")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "compile_mla_rope.py"), *ARCHITECTURES]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernel_compiles(compiled, architecture, kernel):
    facts = compiled[architecture][kernel]
    assert facts["target"] == f"sm_{architecture}"
    assert facts["cubin_bytes"] > 1000
    assert facts["offset_types"] == ["i64"], "an address is made of 32-bit offsets"
    assert facts["product_types"] == ["i64"], "an index meets a stride in 32 bits"
    assert facts["fused"] == 0, "fused multiply-add gives other last bits than the reference"
    assert facts["atomics"] == 0, "a sum by atomics has no order"
