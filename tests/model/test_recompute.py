"""Recompute regions: bit-equal gradients, honest bytes, and the ways a replay has been seen to break."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F

from smoke.model.recompute import Recompute, SavedTensorError


def _weights():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 16, generator=generator).requires_grad_() for _ in range(3)]


def _input():
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(5)).requires_grad_()


def _forward(rc, x, weights, *, tracked=True):
    w_query, w_key, w_out = weights

    def up_projection(x):
        return torch.tanh(x @ w_query), torch.sigmoid(x @ w_key)

    with rc.tracking(weights) if tracked else nullcontext():
        with rc.discard("mla_up_proj", up_projection, x * 1.5) as (q, k):
            y = F.scaled_dot_product_attention(q, k, k, is_causal=True)
        del q, k
        y = rc.checkpoint("mlp", lambda y: torch.relu(y @ w_out) ** 2, y)
        with rc.discard("layernorm", lambda y: F.layer_norm(y, (16,)), y) as h:
            loss = (h * h).sum()
        del h
    return loss


def _gradients(rc, **kwargs):
    x, weights = _input(), _weights()
    loss = _forward(rc, x, weights, **kwargs)
    loss.backward()
    return [loss.detach(), x.grad, *(w.grad for w in weights)]


@pytest.mark.parametrize("regions", [("mla_up_proj",), ("mlp",), ("layernorm",), ("mla_up_proj", "mlp", "layernorm")])
@pytest.mark.parametrize("tracked", [True, False])
def test_gradients_are_bit_equal(regions, tracked):
    plain = _gradients(Recompute())
    rc = Recompute(regions)
    again = _gradients(rc, tracked=tracked)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert rc.replays == dict.fromkeys(regions, 1)


@pytest.mark.parametrize("regions", [("mla_up_proj",), ("mlp",), ("layernorm",), ("mla_up_proj", "mlp", "layernorm")])
def test_bytes_fall_to_the_prediction(regions):
    rc = Recompute(regions)
    rc.active = False
    _gradients(rc)
    off, predicted = rc.ledger.held_bytes, rc.ledger.predicted_bytes
    rc.active = True
    _gradients(rc)
    assert rc.ledger.held_with_recompute_bytes == predicted < off


def test_storages_are_really_freed():
    """What the ledger says is checked against the allocator: the outputs' storages die when consumers are done."""
    import weakref

    rc, seen = Recompute(("mla_up_proj",)), []
    x = _input()

    def region(x):
        out = torch.tanh(x * 2)
        seen.append(weakref.ref(out.untyped_storage()))
        return out

    with rc.tracking():
        with rc.discard("mla_up_proj", region, x) as h:
            y = (h * h.transpose(0, 1).reshape_as(h)).sum()
        del h
    assert seen[0]() is None
    y.backward()
    assert x.grad.abs().sum() > 0


def test_without_regions_nothing_is_replayed():
    rc = Recompute()
    _gradients(rc)
    assert rc.replays == {}


def test_random_state_is_that_of_the_first_pass():
    w = _weights()[0]

    def noisy(x):
        return F.dropout(x @ w, 0.5)

    def run(rc):
        torch.manual_seed(11)
        x = _input()
        with rc.discard("layernorm", noisy, x) as h:
            loss = (h**3).sum()
        after = torch.rand(1)
        loss.backward()
        return loss.detach(), x.grad, after, torch.rand(1)

    state = torch.get_rng_state()
    try:
        assert all(torch.equal(a, b) for a, b in zip(run(Recompute()), run(Recompute(("layernorm",))), strict=True))
    finally:
        torch.set_rng_state(state)


def test_contexts_surround_the_first_pass_and_the_replay():
    log = []

    @contextmanager
    def note(name):
        log.append(name)
        yield
        log.append(f"/{name}")

    rc = Recompute(("layernorm",), lambda: (note("first"), lambda: note("replay")))
    x = _input()
    with rc.discard("layernorm", torch.tanh, x) as h:
        loss = (h * h).sum()
    assert log == ["first", "/first"]
    loss.backward()
    assert log == ["first", "/first", "replay", "/replay"]


def test_a_new_tensor_at_a_freed_address_is_not_taken_for_the_output():
    """Tensors of the output's size are made and saved after the region closed; none may be recognised."""
    rc, x = Recompute(("layernorm",)), _input()
    with rc.tracking():
        with rc.discard("layernorm", torch.tanh, x) as h:
            y = h * 2
        del h
        for _ in range(8):
            y = torch.sigmoid(y)
    reference = _input()
    z = torch.tanh(reference) * 2
    for _ in range(8):
        z = torch.sigmoid(z)
    y.sum().backward()
    z.sum().backward()
    assert torch.equal(x.grad, reference.grad)


@pytest.mark.parametrize("written", ["saved", "output", "argument"])
def test_writing_in_place_after_a_save_is_an_error(written):
    rc, x = Recompute(("layernorm",)), _input()
    source = x * 1.0

    def step():
        with rc.tracking():
            kept = torch.tanh(x)
            with rc.discard("layernorm", torch.sigmoid, source) as h:
                loss = (h * h).sum() + (kept * kept).sum()
                if written == "output":
                    h.detach().mul_(2)
            if written == "saved":
                kept.detach().mul_(2)
            if written == "argument":
                source.detach().mul_(2)
        loss.backward()

    with pytest.raises(SavedTensorError, match="written in place"):
        step()


@pytest.mark.parametrize("regions", [(), ("mlp",)], ids=["outside a region", "inside the replay"])
def test_a_write_in_place_is_reported_with_its_module_and_region(regions):
    """The second product writes over what the first one saved; the report is kept, and backward goes on."""

    class Inner(torch.nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.recompute = Inner(), rc

        def forward(self, x):
            with self.recompute.tracking((), self):
                return self.recompute.checkpoint("mlp", self.region, x)

        def region(self, x):
            y = self.first(x)
            out = y.sum()
            y.detach().mul_(2)
            return out

    rc, found = Recompute(regions), []
    rc.watch.report = found.append
    x = _input()
    Outer()(x).backward()
    assert [write.place for write in found] == ["first" + (" (region mlp)" if regions else "")]
    assert (found[0].shape, found[0].saved_version, found[0].version) == ((2, 8, 16), 0, 1)
    assert rc.watch.looked == 1 + len(regions)  # a region's argument too


def test_places_end_with_the_forward_also_when_it_fails():
    from smoke.model.places import Places

    places, model = Places(), torch.nn.Sequential(torch.nn.Unflatten(1, (3, 3)))
    with places.followed(model), pytest.raises(RuntimeError):
        model(torch.zeros(1, 2))
    assert places.here() == "the model"
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_replay_that_saves_something_else_is_an_error():
    rc, x, calls = Recompute(("layernorm",)), _input(), []

    def changing(x):
        calls.append(1)
        return torch.tanh(x) if len(calls) == 1 else torch.tanh(x) * torch.sigmoid(x)

    with rc.discard("layernorm", changing, x) as h:
        loss = (h * h).sum()
    with pytest.raises(SavedTensorError, match="replay of recompute region layernorm"):
        loss.backward()


def test_a_second_backward_replays_again():
    rc, x = Recompute(("layernorm",)), _input()
    with rc.discard("layernorm", torch.tanh, x) as h:
        loss = (h * h).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_no_region_without_grad():
    rc, x = Recompute(("layernorm", "mlp")), _input()
    with torch.no_grad(), rc.discard("layernorm", torch.tanh, x) as h:
        assert torch.equal(rc.checkpoint("mlp", torch.exp, h), torch.exp(torch.tanh(x)))
    assert rc.replays == {}


def test_an_argument_that_another_region_brings_back():
    """The second region holds a handle, not the first one's output; its replay triggers the first one's."""

    def run(rc):
        x = _input()
        with rc.tracking():
            with rc.discard("layernorm", lambda x: torch.tanh(x) * x, x) as h:
                y = rc.checkpoint("mlp", lambda h: torch.exp(h) * h, h)
            del h
            loss = (y * y).sum()
        loss.backward()
        return loss.detach(), x.grad, rc.ledger

    plain, both = run(Recompute()), run(rc := Recompute(("layernorm", "mlp")))
    assert torch.equal(plain[0], both[0])
    assert torch.equal(plain[1], both[1])
    assert rc.replays == {"layernorm": 1, "mlp": 1}
    assert both[2].held_with_recompute_bytes < plain[2].held_bytes
