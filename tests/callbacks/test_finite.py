"""Finite: offenders by kind and name, NaN that a cast hides, stopping, counts, hooks that go away."""

import math

import pytest
import torch
from callback_toys import Toy, fit, make_batches

from smoke.callbacks import Finite
from smoke.callbacks.finite import FiniteMeter
from smoke.record import FiniteRow


def _row(step, kind, name, nan, inf):
    return FiniteRow(step=step, kind=kind, name=name, nan=nan, inf=inf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_meter_counts_what_it_keeps_and_flags_what_it_does_not(dtype):
    meter = FiniteMeter()
    bad = torch.tensor([math.nan, 1.0, math.inf, -math.inf, math.nan], dtype=dtype)
    meter.look("gradient", "a", bad, keep=True)
    meter.look("input", "b", bad, keep=False)
    meter.look("weight", "c", torch.ones(3, dtype=dtype), keep=True)
    meter.look("input", "d", torch.tensor([-math.inf, math.inf], dtype=dtype), keep=False)
    meter.look("input", "ids", torch.ones(3, dtype=torch.int64), keep=False)
    meter.look("input", "empty", torch.empty(0, dtype=dtype), keep=False)
    found = meter.flush(4)
    assert found == [_row(4, "gradient", "a", 2, 2), _row(4, "input", "b", 1, 0), _row(4, "input", "d", 0, 1)]
    assert meter.rows == found
    assert meter.looked == 4
    assert meter.flush(5) == []


def test_largest_finite_values_are_finite():
    meter = FiniteMeter()
    meter.look("input", "a", torch.full((1000,), torch.finfo(torch.float64).max, dtype=torch.float64), keep=False)
    meter.look("input", "b", torch.full((1000,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16), keep=False)
    assert meter.flush(0) == []


class _HiddenNan(torch.autograd.Function):
    """Like an NVFP4 cast: NaN goes in, 6 comes out."""

    @staticmethod
    def forward(ctx, x):
        return x.nan_to_num(6.0)

    @staticmethod
    def backward(ctx, dy):
        return dy


class _Leaf(torch.nn.Linear):
    def forward(self, x):
        return super().forward(_HiddenNan.apply(x))


def _leaves(module):
    return {"inner": module.inner, "head": module.head}


def test_a_sound_run_has_no_row_and_counts_its_looks():
    finite = Finite(_leaves)
    module = Toy()
    fit(module, make_batches(3), [finite])
    assert finite.rows == []
    assert finite.steps == 3
    assert finite.looked == 3 * (2 + 2 + 1 + 3 + 3)  # inputs, output gradients, loss, gradients, weights
    assert not module.inner._forward_hooks
    assert not module.inner._forward_pre_hooks


def test_nan_that_a_cast_hides_is_found_before_it():
    class Broken(Toy):
        def loss(self, batch):
            hidden = self.embedding(batch["tokens"]).clone()
            if len(self.seen) == 1:
                hidden[0, 0, 0] = math.nan
            return torch.nn.functional.cross_entropy(
                self.head(self.inner(hidden)).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
            )

    module = Broken()
    leaf = _Leaf(8, 8, bias=False, device="meta")
    leaf.weight = module.inner.weight
    module.inner = leaf
    finite = Finite(_leaves)
    fit(module, make_batches(3), [finite])
    assert all(math.isfinite(loss) for loss in module.seen)
    assert (finite.rows[0].step, finite.rows[0].kind, finite.rows[0].name) == (1, "input", "inner")
    assert {r.kind for r in finite.rows if r.step == 1} == {"input"}


def test_nan_in_one_gradient_names_the_parameter_and_stops():
    module = Toy()

    def spoil(parameter):
        if len(module.seen) == 2:
            parameter.grad.fill_(math.nan)

    module.inner.weight.register_post_accumulate_grad_hook(spoil)
    finite = Finite(_leaves, stop=True)
    fit(module, make_batches(5), [finite])
    assert finite.rows[0] == _row(1, "gradient", "inner.weight", 64, 0)
    assert finite.rows[1] == _row(1, "weight", "inner.weight", 64, 0)
    assert len(module.seen) == 2


def test_infinite_output_gradient():
    class Broken(Toy):
        def loss(self, batch):
            return super().loss(batch) * torch.tensor(1e38) * 1e38

    finite = Finite(_leaves)
    fit(Broken(), make_batches(1), [finite])
    kinds = [(r.kind, r.name) for r in finite.rows]
    assert ("loss", "loss") in kinds
    assert ("output_gradient", "head") in kinds


def test_all_labels_ignored():
    items = make_batches(2)
    items[1]["labels"].fill_(-100)
    finite = Finite()
    fit(Toy(), items, [finite])
    assert finite.rows[0] == _row(1, "loss", "loss", 1, 0)


def test_state_and_prefix():
    module = Toy()
    torch.nn.init.constant_(module.inner.weight, math.nan)
    finite, again = Finite(prefix="inner."), Finite()
    fit(module, make_batches(1), [finite])
    again.load_state_dict(finite.state_dict())
    assert (again.rows, again.looked, again.steps) == (finite.rows, finite.looked, 1)
    assert "weight" in {r.name for r in finite.rows}
