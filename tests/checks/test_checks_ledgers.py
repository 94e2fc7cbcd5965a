"""weight_freshness, dtype_ledger and neutrality: one offender is enough, and what was not seen is no PASS."""

import dataclasses

import pytest
from sound_record import QUANTIZED, Case

from smoke.checks.ledgers import HOOKS
from smoke.record import DtypeRow, NeutralRow


@pytest.fixture
def case():
    return Case()


def test_a_stale_weight_is_red_and_named(case):
    place = {"parameter": "weight3", "used_hex": "0x3f80", "fresh_hex": "0x3f81"}
    case.spoil("freshness", {"module": QUANTIZED[1], "step": 5}, stale=1, **place)
    finding = case.only_red("FAIL", "weight_freshness")
    assert finding.where == f"step 5 {QUANTIZED[1]}.weight3 (row operand)"
    assert "0x3f80 multiplied, 0x3f81" in finding.detail


def test_the_earliest_stale_weight_is_named(case):
    case.spoil("freshness", {"module": QUANTIZED[0]}, stale=1)
    case.record.freshness.reverse()
    assert case.only_red("FAIL", "weight_freshness").where.startswith("step 1 ")


@pytest.mark.parametrize("direction", ["row", "col"])
def test_a_leaf_that_was_never_compared_is_no_pass(case, direction):
    case.record.freshness = [
        row for row in case.record.freshness if (row.module, row.direction) != (QUANTIZED[2], direction)
    ]
    finding = case.only_red("ERROR", "weight_freshness")
    assert finding.where == QUANTIZED[2]
    assert direction in finding.detail


@pytest.mark.parametrize("changes", [{"operands": 0}, {"elements": 0}, {"step": 0}])
def test_an_empty_or_early_comparison_is_no_pass(case, changes):
    case.record.freshness[0] = dataclasses.replace(case.record.freshness[0], **changes)
    case.only_red("ERROR", "weight_freshness")


def test_nothing_measured(case):
    case.record.freshness = []
    case.only_red("ERROR", "weight_freshness")


def test_a_conversion_that_matched_nothing_has_no_weight_to_look_at(case):
    case.record.freshness = []
    case.spoil("coverage", quantized_calls=0)
    finding = case.findings()["weight_freshness"]
    assert (finding.status, finding.detail) == ("FAIL", "conversion matched nothing")


@pytest.mark.parametrize(
    ("module", "kind", "dtype"),
    [
        (QUANTIZED[0], "parameter", "float32"),
        (QUANTIZED[0], "gradient", "float32"),
        (QUANTIZED[1], "input", "float32"),
        (QUANTIZED[1], "activation", "float16"),
        (QUANTIZED[2], "master", "bfloat16"),
        ("output_layer", "moment", "bfloat16"),
        ("layers.1.mlp.router", "parameter", "bfloat16"),
        ("layers.1.mlp.router", "activation", "bfloat16"),
        ("layers.1.mlp.router", "buffer", "bfloat16"),
        ("training step", "loss", "bfloat16"),
    ],
)
def test_a_wrong_type_is_red_and_named(case, module, kind, dtype):
    case.spoil("dtypes", {"module": module, "kind": kind}, dtype=dtype, step=3)
    finding = case.only_red("FAIL", "dtype_ledger")
    assert finding.where == f"step 3 {module} {kind}"
    assert finding.measured.startswith(dtype)
    assert "expected" in finding.detail


def test_a_second_type_beside_the_right_one_is_red(case):
    case.record.dtypes.append(DtypeRow(module=QUANTIZED[0], kind="activation", dtype="float32", step=7, tensors=1))
    assert case.only_red("FAIL", "dtype_ledger").where == f"step 7 {QUANTIZED[0]} activation"


def test_an_unknown_kind_is_red(case):
    case.record.dtypes.append(DtypeRow(module="a", kind="wish", dtype="float32", step=0, tensors=1))
    case.only_red("FAIL", "dtype_ledger")


@pytest.mark.parametrize("kind", ["parameter", "input", "activation", "gradient", "master", "moment", "loss"])
def test_each_kind_must_have_been_seen(case, kind):
    case.record.dtypes = [row for row in case.record.dtypes if row.kind != kind]
    assert kind in case.only_red("ERROR", "dtype_ledger").detail


def test_a_parameter_without_master_is_no_pass(case):
    case.record.dtypes = [r for r in case.record.dtypes if (r.module, r.kind) != ("output_layer", "master")]
    assert case.only_red("ERROR", "dtype_ledger").where == "output_layer"


def test_a_module_that_ran_unseen_is_no_pass(case):
    case.record.dtypes = [r for r in case.record.dtypes if (r.module, r.kind) != (QUANTIZED[2], "activation")]
    assert case.only_red("ERROR", "dtype_ledger").where == QUANTIZED[2]


def test_types_are_looked_at_in_every_step(case):
    case.record.dtype_steps = 9
    assert "9 of 10 steps" in case.only_red("ERROR", "dtype_ledger").detail


def test_gradients_of_several_micro_batches_add_up_in_float32(case):
    case.plan.config.trainer.accumulate_grad_batches = 2
    assert case.only_red("FAIL", "dtype_ledger").where.endswith("gradient")
    case.spoil("dtypes", {"kind": "gradient"}, dtype="float32")
    assert case.findings()["dtype_ledger"].status == "PASS"


def test_a_change_by_a_callback_is_red_and_named(case):
    case.record.neutral = [
        NeutralRow(step=3, hook="on_after_backward", name="random state of torch"),
        NeutralRow(step=4, hook="on_train_batch_end", name="buffer load"),
    ]
    finding = case.only_red("FAIL", "neutrality")
    assert finding.where == "step 3 on_after_backward: random state of torch"
    assert finding.detail == "buffer load"


@pytest.mark.parametrize("step", [0, 1, 2])
def test_one_bit_of_a_loss_is_red(case, step):
    losses = list(case.record.watched_losses)
    losses[step] = (float.fromhex(losses[step]) + 2.0**-50).hex()
    case.record.watched_losses = tuple(losses)
    finding = case.only_red("FAIL", "neutrality")
    assert finding.where == f"step {step} loss"
    assert losses[step] in finding.detail


def test_a_nan_with_callbacks_is_red(case):
    case.record.watched_losses = ("nan", *case.record.watched_losses[1:])
    case.only_red("FAIL", "neutrality")


@pytest.mark.parametrize("field", ["watched_losses", "unwatched_losses"])
@pytest.mark.parametrize("count", [0, 1])
def test_too_few_losses_are_no_pass(case, field, count):
    setattr(case.record, field, getattr(case.record, field)[:count])
    assert "losses compared" in case.only_red("ERROR", "neutrality").detail


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_of_every_step_must_have_been_looked_at(case, hook):
    case.record.neutral_looks[hook] = 9
    assert case.only_red("ERROR", "neutrality").where == hook
    del case.record.neutral_looks[hook]
    case.only_red("ERROR", "neutrality")


def test_losses_of_steps_that_do_not_repeat_are_not_compared(case):
    case.record.watched_losses = ("0x1p0", *case.record.watched_losses[1:])
    case.spoil("bits", {"kind": "rerun", "step": 1, "quantity": "gradient"}, equal=False)
    finding = case.findings()["neutrality"]
    assert (finding.status, finding.where) == ("ERROR", "step 0 loss")
