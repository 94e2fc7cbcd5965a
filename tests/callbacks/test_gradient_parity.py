"""GradientParity: schedule, replayed and free routing, slices, accumulation, zero and non-finite gradients."""

import copy
import math

import pytest
import torch
from callback_toys import Toy, fit, make_batches

from smoke.callbacks import GradientParity
from smoke.callbacks.gradient_parity import compare_gradients


class _Recorder:
    """Gives out numbered tapes."""

    def __init__(self):
        self.started = 0

    def start(self):
        self.started += 1

    def stop(self):
        return f"tape {self.started}"


def _twin(module, calls, wrong=None):
    """A reference on a copy of the module with the watched weights; ``wrong`` may spoil its gradients."""
    twin = copy.deepcopy(module)
    twin.dropout = torch.nn.Identity()

    def reference(batch, tape):
        calls.append(tape)
        twin.load_state_dict(module.state_dict())
        twin.zero_grad()
        torch.rand(3)
        twin.loss(batch).backward()
        gradients = {name: p.grad.clone() for name, p in twin.named_parameters()}
        if wrong is not None:
            wrong(gradients)
        return gradients

    return reference


def _module():
    module = Toy()
    module.dropout = torch.nn.Identity()
    return module


def test_schedule_tapes_and_rows():
    module, calls, recorder = _module(), [], _Recorder()
    slices = {"inner.weight": [("top", 0, 2), ("rest", 2, 8)]}
    parity = GradientParity(_twin(module, calls), recorder, slices, {"inner.weight"}.__contains__, every=2)
    fit(module, make_batches(5), [parity])
    assert calls == ["tape 1", None, "tape 2", "tape 3"]
    assert {(r.step, r.routing) for r in parity.rows} == {
        (0, "replayed"),
        (0, "free"),
        (2, "replayed"),
        (4, "replayed"),
    }
    labels = {(r.parameter, r.slice) for r in parity.rows if r.step == 2}
    assert labels == {
        ("embedding.weight", ""), ("inner.weight", ""), ("inner.weight", "top"), ("inner.weight", "rest"),
        ("head.weight", ""),
    }  # fmt: skip
    assert {r.parameter for r in parity.rows if r.quantized} == {"inner.weight"}
    assert max(r.relative_error for r in parity.rows) == 0.0
    assert min(r.cosine for r in parity.rows) == pytest.approx(1.0)
    assert all(r.norm == r.reference_norm > 0 for r in parity.rows)


def test_free_routing_every_time():
    module, calls = _module(), []
    parity = GradientParity(_twin(module, calls), _Recorder(), {}, lambda name: False, every=2, free_every_time=True)
    fit(module, make_batches(3), [parity])
    assert calls == ["tape 1", None, "tape 2", None]


def test_the_first_comparison_may_come_later():
    module, calls = _module(), []
    parity = GradientParity(_twin(module, calls), _Recorder(), {}, lambda name: False, every=2, first=1)
    fit(module, make_batches(5), [parity])
    assert calls == ["tape 1", None, "tape 2"]
    assert {(r.step, r.routing) for r in parity.rows} == {(1, "replayed"), (1, "free"), (3, "replayed")}


def test_without_a_recorder_only_replayed_rows():
    module, calls = _module(), []
    parity = GradientParity(_twin(module, calls), None, {}, lambda name: False)
    fit(module, make_batches(1), [parity])
    assert calls == [None]
    assert {r.routing for r in parity.rows} == {"replayed"}


def test_a_wrong_slice_shows_in_its_row_only():
    def wrong(gradients):
        gradients["inner.weight"][:1] *= -1

    module = _module()
    slices = {"inner.weight": [("head 0", 0, 1), ("head 1", 1, 2)]}
    parity = GradientParity(_twin(module, [], wrong), None, slices, lambda name: True)
    fit(module, make_batches(1), [parity])
    errors = {(r.parameter, r.slice): r.relative_error for r in parity.rows}
    assert errors["inner.weight", "head 0"] == pytest.approx(2.0)
    assert errors["inner.weight", "head 1"] == 0.0
    assert 0 < errors["inner.weight", ""] < 2


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1e-4}])
def test_gradients_are_whole_after_accumulation_and_before_clipping(options):
    module, calls = _module(), []
    parity = GradientParity(_twin(module, calls), _Recorder(), {}, lambda name: True)
    fit(module, make_batches(4), [parity], **options)
    assert max(r.relative_error for r in parity.rows) < 1e-6
    assert calls[0] == "tape 1"
    assert {r.step for r in parity.rows} == {0}


def test_state_and_prefix():
    module = _module()
    reference = _twin(module, [])
    parity = GradientParity(
        lambda batch, tape: {k.removeprefix("inner."): v for k, v in reference(batch, tape).items()},
        None, {}, lambda name: name == "weight", prefix="inner.",
    )  # fmt: skip
    fit(module, make_batches(1), [parity])
    assert [r.parameter for r in parity.rows if r.quantized] == ["weight"]
    again = GradientParity(reference, None, {}, bool)
    again.load_state_dict(parity.state_dict())
    assert again.rows == parity.rows


def _rows(left, right):
    return list(compare_gradients({"w": left}, {"w": right}, step=0, routing="replayed", slices={}, quantized=bool))


@pytest.mark.parametrize("pair", [(None, None), (torch.zeros(2, 2), None), (None, torch.zeros(2, 2))])
def test_two_zero_gradients_agree(pair):
    (row,) = _rows(*pair)
    assert (row.relative_error, row.cosine, row.norm, row.reference_norm) == (0.0, 1.0, 0.0, 0.0)


def test_one_zero_gradient_does_not_agree():
    assert _rows(None, torch.ones(2))[0].relative_error == 1.0
    assert _rows(torch.ones(2), None)[0].relative_error == math.inf


def test_nan_stays_nan():
    (row,) = _rows(torch.tensor([1.0, math.nan]), torch.ones(2))
    assert math.isnan(row.relative_error)
    assert math.isnan(row.norm)


def test_every_must_be_positive():
    with pytest.raises(ValueError, match="at least 1"):
        GradientParity(lambda batch, tape: {}, None, {}, bool, every=0)
