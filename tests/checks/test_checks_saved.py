"""saved_tensors: a write in place is red and placed; steps that nobody looked at are an error."""

import pytest
from sound_record import STEPS, Case

from smoke.record import SavedRow


@pytest.fixture
def case():
    return Case()


def row(step: int | None, place: str = "layers.0.k_up (region mla_up_proj)") -> SavedRow:
    return SavedRow(step=step, place=place, shape=(4, 8), dtype="bfloat16", saved_version=2, version=3)


def test_one_write_is_red_and_placed(case):
    case.record.saved = [row(3)]
    finding = case.only_red("FAIL", "saved_tensors")
    assert finding.where == "step 3 layers.0.k_up (region mla_up_proj)"
    assert finding.detail == "bfloat16 [4, 8], version 2 when saved, 3 in backward"


def test_training_is_named_before_what_came_before_it(case):
    case.record.saved = [row(None), row(None, "b"), row(1, "b")]
    finding = case.only_red("FAIL", "saved_tensors")
    assert (finding.measured, finding.where) == ("2 places", "step 1 b")
    case.record.saved = [row(None)]
    assert case.only_red("FAIL", "saved_tensors").where.startswith("before training layers.0")


def test_nothing_looked_at_is_an_error(case):
    case.record.saved_looked = 0
    assert "measured nothing" in case.only_red("ERROR", "saved_tensors").detail


def test_a_step_without_a_look_is_an_error(case):
    case.record.saved_steps = STEPS - 1
    assert f"{STEPS - 1} of {STEPS} steps" in case.only_red("ERROR", "saved_tensors").detail
