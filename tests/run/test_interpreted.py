"""The Triton kernels in the interpreter's process: sound ones are green, a fault gets in too and is placed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from small_runs import small_config

from smoke.checks.rope import rope_contract
from smoke.config import CheckConfig
from smoke.environment import detect
from smoke.faults import by_name, injected
from smoke.plan import MISSING, Refusal, resolve
from smoke.record import Record
from smoke.run.interpreted import interpreted_rows

PLAN = SimpleNamespace(impl="reference")


def test_sound_kernels_hold_and_every_kind_is_measured():
    pytest.importorskip("triton")
    rows = interpreted_rows()
    assert {row.kind for row in rows} == {"forward", "gradient", "unwritten", "outside", "input", "repeat"}
    assert rope_contract(Record(rope=rows), PLAN, None).status == "ERROR"  # no tables, scales and positions
    assert max(row.value for row in rows) <= 3.0


def test_a_fault_is_put_into_the_process_too():
    pytest.importorskip("triton")
    with injected(by_name("head-mask-inside-the-block")):
        finding = rope_contract(Record(rope=interpreted_rows()), PLAN, None)
    assert finding.status == "FAIL"
    assert "5 heads" in finding.where
    assert "outside" in finding.detail


def test_without_triton_it_is_refused():
    environment = detect()
    packages = {name: version for name, version in environment.packages.items() if name != "triton"}
    config = small_config(check=CheckConfig(triton_interpreter=True))
    with pytest.raises(Refusal, match="--check.triton_interpreter: .*triton") as refused:
        resolve(config, dataclasses.replace(environment, packages=packages))
    assert refused.value.exit_code == MISSING
