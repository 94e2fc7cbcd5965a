"""baseline: one wrong step, all wrong, NaN, missing and extra steps; costs against the noise of the recorded runs."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from sound_record import STEPS, Case

from smoke.checks.baseline import bound, cost_bound, is_worse
from smoke.record.baseline import BaselineRows, CostRow


@pytest.fixture
def case():
    return Case()


def recorded(case: Case, losses=None, **costs: tuple[float | None, tuple[float, ...]]) -> Case:
    """Spoil the recorded side: its losses, or value and recorded values of a cost."""
    known = case.record.baseline
    assert known is not None
    rows = tuple(
        dataclasses.replace(row, value=costs[row.quantity][0], recorded=costs[row.quantity][1])
        if row.quantity in costs
        else row
        for row in known.costs
    )
    case.record.baseline = dataclasses.replace(
        known, losses=known.losses if losses is None else tuple(losses), costs=rows
    )
    return case


def losses(case: Case) -> list[tuple[int, str]]:
    assert case.record.baseline is not None
    return list(case.record.baseline.losses)


def nudged(text: str) -> str:
    return math.nextafter(float.fromhex(text), math.inf).hex()


@pytest.mark.parametrize("step", [0, 4, STEPS - 1])
def test_one_wrong_step_is_named(case, step):
    found = [(s, nudged(x) if s == step else x) for s, x in losses(case)]
    finding = recorded(case, found).only_red("FAIL", "baseline")
    assert finding.where == f"step {step}"
    assert finding.measured.startswith(f"1 of {STEPS} losses differ")
    assert found[step][1] in finding.detail


def test_all_wrong(case):
    finding = recorded(case, [(s, nudged(x)) for s, x in losses(case)]).only_red("FAIL", "baseline")
    assert (finding.where, finding.measured.split(",")[0]) == ("step 0", f"{STEPS} of {STEPS} losses differ")


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_what_is_not_finite_equals_nothing(case, word):
    case.spoil("steps", {"step": 3}, loss_hex=word)
    recorded(case, [(s, word if s == 3 else x) for s, x in losses(case)])
    finding = case.findings()["baseline"]
    assert (finding.status, finding.where) == ("FAIL", "step 3")
    assert "equals nothing" in finding.detail


def test_nan_on_one_side_only(case):
    recorded(case, [(s, "nan" if s == 3 else x) for s, x in losses(case)])
    assert case.only_red("FAIL", "baseline").where == "step 3"


def test_minus_zero_is_not_zero(case):
    case.spoil("steps", {"step": 3}, loss_hex=(0.0).hex())
    recorded(case, [(s, (-0.0).hex() if s == 3 else x) for s, x in losses(case)])
    assert case.findings()["baseline"].where == "step 3"


def test_a_step_that_the_baseline_lacks(case):
    finding = recorded(case, losses(case)[:-1]).only_red("FAIL", "baseline")
    assert (finding.where, finding.detail) == (f"step {STEPS - 1}", "not in the baseline")


@pytest.mark.parametrize("step", [0, 5, STEPS - 1])
def test_a_step_that_the_run_lacks(case, step):
    case.record.steps = [row for row in case.record.steps if row.step != step]
    finding = case.findings()["baseline"]
    assert (finding.status, finding.where) == ("FAIL", f"step {step}")
    assert "missing in this run" in finding.detail


def test_a_step_that_stands_twice(case):
    case.record.steps.append(case.record.steps[4])
    assert case.findings()["baseline"].where == "step 4"
    assert recorded(Case(), [*losses(Case()), losses(Case())[2]]).findings()["baseline"].where == "step 2"


def test_shifted_by_one_step(case):
    finding = recorded(case, [(s + 1, x) for s, x in losses(case)]).only_red("FAIL", "baseline")
    assert finding.measured.startswith(f"{STEPS + 1} of {STEPS + 1} losses differ")


def test_outside_of_its_key_it_is_skipped_with_the_reason(case):
    case.record.baseline = BaselineRows(outside="torch 2.12.0 recorded, 2.13.0 here")
    finding = case.findings()["baseline"]
    assert (finding.status, finding.detail) == ("SKIP", "torch 2.12.0 recorded, 2.13.0 here")


@pytest.mark.parametrize("spoil", ["nothing read", "no loss recorded", "no step"])
def test_nothing_compared_is_no_pass(case, spoil):
    if spoil == "nothing read":
        case.record.baseline = None
    elif spoil == "no loss recorded":
        recorded(case, [])
    else:
        case.record.steps = []
    assert case.findings()["baseline"].status == "ERROR"


@pytest.mark.parametrize(
    ("quantity", "value", "known", "red"),
    [
        ("tokens_per_s", 700.0, (880.0, 905.0, 920.0, 890.0, 900.0), True),
        ("tokens_per_s", 1800.0, (880.0, 905.0, 920.0, 890.0, 900.0), False),
        ("tokens_per_s", 700.0, (700.0, 1100.0, 900.0, 800.0, 1000.0), False),
        ("tokens_per_s", 700.0, (900.0, 900.0), False),
        ("tokens_per_s", 860.0, (900.0, 900.0, 900.0), False),
        ("tokens_per_s", 850.0, (900.0, 900.0, 900.0), True),
        ("tokens_per_s", math.nan, (880.0, 905.0, 920.0), True),
        ("tokens_per_s", None, (880.0, 905.0, 920.0), False),
        ("peak_gib", 1.2, (1.0, 1.0, 1.0), True),
        ("peak_gib", 0.5, (1.0, 1.0, 1.0), False),
        ("held_mib", 8.1, (8.0, 8.0, 8.0), True),
        ("held_mib", math.inf, (8.0, 8.0, 8.0), True),
    ],
)
def test_costs_are_judged_by_the_noise_of_the_recorded_runs(case, quantity, value, known, red):
    recorded(case, **{quantity: (value, known)})
    if red:
        assert case.only_red("FAIL", "baseline").where == quantity
    else:
        assert case.findings()["baseline"].status == "PASS"


def test_a_wrong_loss_goes_before_a_cost(case):
    recorded(case, [(s, nudged(x)) for s, x in losses(case)], held_mib=(9.0, (8.0, 8.0, 8.0)))
    assert case.only_red("FAIL", "baseline").where == "step 0"


@pytest.mark.parametrize("count", [3, 5, 20])
def test_false_alarms_are_rare_and_a_halved_speed_is_seen(count):
    draws = random.Random(0)
    alarms = seen = 0
    for _ in range(4000):
        known = tuple(draws.gauss(1000, 50) for _ in range(count))
        row = CostRow(quantity="tokens_per_s", value=draws.gauss(1000, 50), recorded=known)
        alarms += is_worse(row)
        seen += is_worse(dataclasses.replace(row, value=draws.gauss(500, 25)))
    assert alarms <= 0.003 * 4000
    assert seen >= {3: 0.0, 5: 0.75, 20: 1.0}[count] * 4000


def test_the_interval_is_that_of_the_books():
    """Five runs, mean 100, standard deviation 10 (sample): t = 7.173 with four degrees of freedom."""
    known = (100 - math.sqrt(200), 100.0, 100.0, 100.0, 100 + math.sqrt(200))
    limit = bound(known, 0.05, lower=True)
    assert limit == pytest.approx(100 - 7.173 * 10 * math.sqrt(1.2), abs=0.1)
    assert bound(known[:2], 0.05, lower=True) is None
    high = cost_bound(CostRow(quantity="peak_gib", value=1.0, recorded=known))
    assert high == pytest.approx(100 + 7.173 * 10 * math.sqrt(1.2), abs=0.1)
