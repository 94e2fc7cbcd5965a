"""GradientPresence: absent, zero and idle gradients are told apart; state."""

import torch
from callback_toys import Toy, fit, make_batches

from smoke.callbacks import GradientPresence
from smoke.callbacks.presence import PresenceMeter
from smoke.record import PresenceRow


def _row(parameter, present, nonzero, steps, may_be_zero=False):
    return PresenceRow(
        parameter=parameter, present_steps=present, nonzero_steps=nonzero, steps=steps, may_be_zero=may_be_zero
    )


def test_meter_counts_expected_steps_only():
    meter = PresenceMeter()
    meter.step({"a": True, "b": None, "expert": None, "never": None}, {"expert", "never"})
    meter.step({"a": False, "b": True, "expert": True, "never": False}, {"never"})
    assert meter.rows() == [
        _row("a", 2, 1, 2),
        _row("b", 1, 1, 2),
        _row("expert", 1, 1, 1),
        _row("never", 0, 0, 0, True),
    ]


def test_detached_and_zero_parameters():
    class Broken(Toy):
        def loss(self, batch):
            hidden = self.inner(self.embedding(batch["tokens"]).detach())
            return super().loss(batch | {"labels": batch["labels"]}).detach() + (self.head(hidden) * 0).sum()

    presence = GradientPresence()
    module = Broken()
    module.embedding.weight.requires_grad_(True)
    fit(module, make_batches(2), [presence])
    assert presence.rows() == [
        _row("embedding.weight", 0, 0, 2),
        _row("inner.weight", 2, 0, 2),
        _row("head.weight", 2, 0, 2),
    ]


def test_idle_prefix_frozen_and_state():
    module = Toy()
    module.head.weight.requires_grad_(False)
    presence, again = GradientPresence(lambda: ["weight"], prefix="inner."), GradientPresence()
    fit(module, make_batches(2), [presence])
    assert presence.rows() == [_row("embedding.weight", 2, 2, 2), _row("weight", 0, 0, 0, True)]
    again.load_state_dict(presence.state_dict())
    assert again.rows() == presence.rows()


def test_nan_is_not_zero():
    items = make_batches(1)
    items[0]["labels"].fill_(-100)
    presence = GradientPresence()
    fit(Toy(), items, [presence])
    assert all(row.present_steps == 1 for row in presence.rows())
    assert torch.tensor(float("nan")).any()
