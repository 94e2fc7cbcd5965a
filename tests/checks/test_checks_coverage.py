"""preflight and coverage, spoilt in each way they exist for."""

import pytest
from sound_record import Case, make_plan

Q_UP = "layers.0.self_attention.linear_q_up_proj"


@pytest.fixture
def case():
    return Case()


@pytest.mark.parametrize(
    ("rule", "value", "required", "good"),
    [
        ("multiple", 64, 32, True), ("multiple", 48, 32, False), ("multiple", 0, 32, False), ("multiple", 32, 0, False),
        ("equal", 16, 16, True), ("equal", 8, 16, False), ("at_least", 16, 16, True), ("at_least", 15, 16, False),
        ("unheard of", 1, 1, False),
    ],
)  # fmt: skip
def test_preflight_rules(case, rule, value, required, good):
    case.spoil("preflight", quantity="rope table width", rule=rule, value=value, required=required)
    finding = case.findings()["preflight"]
    assert finding.status == ("PASS" if good else "FAIL")
    assert good or (finding.where == "m" and f"rope table width {value}" in finding.measured)


def test_conversion_that_matched_nothing(case):
    case.spoil("coverage", planned=False, quantized_calls=0, replay_quantized_calls=0, bf16_calls=10)
    assert "matched nothing" in case.only_red("FAIL", "coverage").detail


def test_no_rows_at_all_in_a_quantized_run(case):
    case.record.coverage = []
    case.only_red("FAIL", "coverage")


@pytest.mark.parametrize(
    ("which", "changes", "where"),
    [
        ({"module": Q_UP, "gemm": "grad_weight"}, {"quantized_calls": 0}, f"{Q_UP} grad_weight"),
        ({"module": Q_UP, "gemm": "grad_input"}, {"bf16_calls": 1}, f"{Q_UP} grad_input"),
        ({"module": Q_UP, "gemm": "output"}, {"replay_bf16_calls": 1}, f"{Q_UP} output (replay)"),
        ({"module": Q_UP, "gemm": "output"}, {"replay_quantized_calls": 0}, f"{Q_UP} output (replay)"),
        ({"module": "layers.0.mlp.linear_fc1", "gemm": "output"}, {"replay_quantized_calls": 0}, "fc1 output (replay)"),
        ({"module": "output_layer", "gemm": "output"}, {"quantized_calls": 1}, "output_layer output"),
        ({"module": "output_layer", "gemm": "output"}, {"planned": True, "quantized_calls": 9}, "output_layer output"),
        ({"module": "output_layer"}, {"module": "layers.1.mlp.router", "quantized_calls": 1}, "router output"),
        ({"module": "output_layer"}, {"module": "layers.1.mlp.shared", "quantized_calls": 1}, "shared output"),
        ({"gemm": "grad_weight", "module": Q_UP}, {"gemm": "grad_wait"}, f"{Q_UP} grad_weight"),
    ],
)  # fmt: skip
def test_rows_that_did_not_run_as_planned(case, which, changes, where):
    findings = case.spoil("coverage", which, **changes).findings()
    assert findings["coverage"].status == "FAIL"
    assert where in findings["coverage"].where
    # A leaf that nobody was told of was not looked at for stale weights and for types either.
    others = {"coverage", "weight_freshness", "dtype_ledger"}
    assert {name for name, f in findings.items() if f.status != "PASS"} <= others


def test_replays_outside_the_context_name_every_leaf(case):
    case.spoil("coverage", {"gemm": "output", "planned": True, "replay_quantized_calls": 10},
               replay_quantized_calls=0, replay_bf16_calls=10)  # fmt: skip
    finding = case.only_red("FAIL", "coverage")
    assert "replayed calls in BF16" in finding.measured
    assert "linear_fc1 output (replay)" in finding.detail


def test_regions_that_hold_no_gemm_ask_for_no_replay(case):
    case.plan.config.recompute = ("layernorm", "moe_act", "core_attn")
    case.spoil("coverage", replay_quantized_calls=0)
    assert case.findings()["coverage"].status == "PASS"


def test_weight_holders_must_run_in_the_plain_form(case):
    case.plan.config.model.attention_form = "plain"
    assert "linear_kv_up_proj output" in case.only_red("FAIL", "coverage").where


def test_bf16_run_quantizes_nothing(case):
    case.plan = make_plan("bf16", required=("coverage",))
    case.spoil("coverage", planned=False, quantized_calls=0, replay_quantized_calls=0, bf16_calls=10)
    assert case.findings()["coverage"].status == "PASS"
    case.spoil("coverage", {"module": Q_UP, "gemm": "output"}, planned=True, quantized_calls=1)
    assert case.only_red("FAIL", "coverage").where == f"{Q_UP} output"
