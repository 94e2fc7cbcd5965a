"""recompute_parity and determinism: one bit is enough, noise is an ERROR, and what was not compared is no PASS."""

import dataclasses

import pytest
from sound_record import Case

DIFFERENT = {
    "equal": False, "slice": "head 1", "first_index": (3, 7), "left_hex": "0x3f80", "right_hex": "0x3f81",
    "mismatches": 1,
}  # fmt: skip


@pytest.fixture
def case():
    return Case()


@pytest.mark.parametrize("quantity", ["loss", "gradient", "weight"])
def test_one_bit_turns_recompute_red(case, quantity):
    case.spoil("bits", {"kind": "recompute", "step": 2, "quantity": quantity}, **DIFFERENT)
    finding = case.only_red("FAIL", "recompute_parity")
    assert finding.where.startswith(f"step 2 {quantity}")
    assert "[head 1] at [3, 7]" in finding.where
    assert "0x3f80 against 0x3f81" in finding.detail


def test_the_router_counter_is_part_of_it(case):
    case.spoil("bits", {"kind": "recompute", "step": 1, "name": "router.expert_bias"}, **DIFFERENT)
    assert "router.expert_bias" in case.only_red("FAIL", "recompute_parity").where


def test_the_earliest_difference_is_named(case):
    case.spoil("bits", {"kind": "recompute", "step": 2}, **DIFFERENT)
    case.spoil("bits", {"kind": "recompute", "step": 1, "quantity": "weight"}, **DIFFERENT)
    assert case.only_red("FAIL", "recompute_parity").where.startswith("step 1 weight a.weight")


def test_noise_is_an_error_for_recompute_and_red_for_determinism(case):
    case.spoil("bits", {"kind": "rerun", "step": 1, "quantity": "gradient"}, **DIFFERENT)
    findings = case.findings()
    assert findings["recompute_parity"].status == "ERROR"
    assert findings["determinism"].status == "FAIL"
    assert findings["determinism"].where.startswith("step 1 gradient a.weight")
    assert {f.status for name, f in findings.items() if name not in ("recompute_parity", "determinism")} == {"PASS"}


def test_a_replay_that_broke_off_is_red_and_says_why(case):
    case.record.bits = [row for row in case.record.bits if row.kind == "rerun" or row.step == 0]
    row = dataclasses.replace(
        case.record.bits[-1], kind="recompute", step=1, quantity="loss", name="Broke off", equal=False
    )
    case.record.bits.append(row)
    assert "Broke off" in case.only_red("FAIL", "recompute_parity").where


def test_missing_noise_floor(case):
    case.record.bits = [row for row in case.record.bits if row.kind == "recompute"]
    case.only_red("ERROR", "recompute_parity", "determinism")
    case.spoil("bits", {"step": 2, "quantity": "loss"}, **DIFFERENT)
    assert case.findings()["recompute_parity"].status == "FAIL"


def test_two_steps_are_not_enough(case):
    case.record.bits = [row for row in case.record.bits if row.kind == "rerun" or row.step < 2]
    assert "2 steps" in case.only_red("ERROR", "recompute_parity").detail


@pytest.mark.parametrize("quantity", ["loss", "gradient", "weight"])
def test_each_quantity_must_be_there_in_each_step(case, quantity):
    case.record.bits = [
        row for row in case.record.bits if (row.kind, row.step, row.quantity) != ("recompute", 1, quantity)
    ]
    assert f"no {quantity} compared at step 1" in case.only_red("ERROR", "recompute_parity").detail


def test_each_weight_must_be_there_in_each_step(case):
    case.record.bits = [row for row in case.record.bits if (row.step, row.name) != (1, "router.expert_bias")]
    assert "router.expert_bias" in case.only_red("ERROR", "recompute_parity", "determinism").detail


def test_comparing_no_element_is_no_comparison(case):
    case.spoil("bits", {"kind": "recompute", "step": 1, "quantity": "gradient"}, elements=0)
    case.only_red("ERROR", "recompute_parity")
