"""attention_backend: one unfused call is red and placed; a module without a call is an error."""

import pytest
from sound_record import Case

from smoke.record import AttentionRow


@pytest.fixture
def case():
    return Case()


def row(module: str, backend: str, calls: int = 1) -> AttentionRow:
    return AttentionRow(module=module, backend=backend, dtype="bfloat16", columns=576, calls=calls)


def test_what_ran_is_counted_by_kernel(case):
    case.record.attention.append(row("mtp.attention", "efficient", 3))
    assert case.findings()["attention_backend"].measured == "3 x efficient, 20 x flash in 3 modules"


@pytest.mark.parametrize("backend", ["math", "something new"])
def test_one_unfused_call_is_red(case, backend):
    case.record.attention.append(row("layers.1.self_attention", backend))
    finding = case.only_red("FAIL", "attention_backend")
    assert (finding.where, finding.measured) == ("layers.1.self_attention", f"1 calls unfused ({backend})")
    assert finding.detail == "bfloat16, query, key and value of 576 columns; 1 of 2 modules"


def test_every_module_unfused_is_said(case):
    case.spoil("attention", backend="math")
    assert case.only_red("FAIL", "attention_backend").detail.endswith("every module")


def test_a_module_without_a_call_is_an_error(case):
    case.record.attention.append(row("mtp.attention", "", 0))
    assert case.only_red("ERROR", "attention_backend").where == "mtp.attention"


def test_no_row_is_an_error(case):
    case.record.attention = []
    case.only_red("ERROR", "attention_backend")
