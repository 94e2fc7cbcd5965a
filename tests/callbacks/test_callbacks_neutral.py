"""A run with every callback is bit-identical to one without, also when resumed; importing the package is free."""

import subprocess
import sys

import pytest
import torch
from callback_toys import Saver, Toy, fit, make_batches

import smoke.callbacks
from smoke.callbacks import Coverage, Finite, GradientParity, GradientPresence, LossTracker, StepLog, Throughput


class _Recorder:
    def start(self):
        pass

    def stop(self):
        return "tape"


def _callbacks(module, rows):
    def reference(batch, tape):
        torch.rand(5)
        return {name: torch.rand_like(p) for name, p in module.named_parameters()}

    loss, throughput = LossTracker(), Throughput(label="native")
    return throughput.around(
        [
            Finite(lambda m: {"inner": m.inner, "head": m.head}),
            GradientPresence(),
            GradientParity(reference, _Recorder(), {"inner.weight": [("a", 0, 4)]}, bool, every=1),
            loss,
            StepLog(loss, throughput, rows.append),
            Coverage(list),
        ]
    )


def _bits(module):
    return {name: p.detach().view(torch.int32).clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
def test_callbacks_change_no_bit(options):
    plain, watched, rows = Toy(), Toy(), []
    fit(plain, make_batches(4), [], **options)
    fit(watched, make_batches(4), _callbacks(watched, rows), **options)
    assert plain.seen == watched.seen
    assert torch.equal(plain.random_state, watched.random_state)
    left, right = _bits(plain), _bits(watched)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert len(rows) == 4 // options.get("accumulate_grad_batches", 1)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")  # the batches here start again
def test_state_goes_through_a_checkpoint(tmp_path):
    module, rows = Toy(), []
    fit(module, make_batches(4), [*_callbacks(module, rows), Saver(tmp_path / "a.ckpt")], max_steps=2)
    resumed, more = Toy(), []
    callbacks = _callbacks(resumed, more)
    fit(resumed, make_batches(4), callbacks, ckpt_path=tmp_path / "a.ckpt")
    assert [r.step for r in rows] == [0, 1]
    assert [r.step for r in more] == [0, 1, 2, 3]  # a resumed run has a sink of its own, which gets all rows
    assert more[:2] == rows
    throughput, finite, presence, parity, loss, *_ = callbacks
    assert [s.step for s in loss.samples] == [0, 1, 2, 3]
    assert [s.step for s in throughput.meter.steps] == [0, 1, 2, 3]
    assert finite.steps == 4
    assert {row.steps for row in presence.rows()} == {4}
    assert sorted({r.step for r in parity.rows}) == [0, 1, 2, 3]
    assert loss.tokens() == sum(s.tokens for s in loss.samples)


def test_importing_the_package_loads_neither_torch_nor_lightning():
    code = "import sys, smoke.callbacks; print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_resolves():
    assert [getattr(smoke.callbacks, name).__name__ for name in smoke.callbacks.__all__] == smoke.callbacks.__all__
    with pytest.raises(AttributeError, match="Missing"):
        _ = smoke.callbacks.Missing
