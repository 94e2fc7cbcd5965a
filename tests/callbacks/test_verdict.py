"""judge: the checks over callbacks of any Trainer, also when they are used wrongly."""

from __future__ import annotations

import math
import pathlib
import re
import warnings

import lightning
import pytest
import torch
from callback_toys import Batches, Saver, Toy, fit, make_batches

from smoke.callbacks import (
    Coverage,
    Finite,
    GemmCounter,
    GradientParity,
    GradientPresence,
    LossTracker,
    Throughput,
    twin_reference,
)
from smoke.verdict import Verdict, judge


class Validated(Toy):
    """Toy with a validation loop that draws random numbers."""

    def validation_step(self, batch, batch_idx):
        torch.rand(3)
        return self.loss(batch)


def _loss(toy, batch):
    return toy.loss(batch)


def _parity(module, **options):
    with torch.device("meta"):
        twin = Toy()
    return GradientParity(twin_reference(module, twin, _loss), **{"every": 2, **options})


def _watched(module):
    throughput = Throughput(warmup_steps=1)
    return throughput.around([LossTracker(), Finite(), GradientPresence(), _parity(module)])


def _statuses(verdict):
    return {finding.name: finding.status for finding in verdict.findings}


ALL_GREEN = dict.fromkeys(("gradient_parity", "finite", "gradient_presence", "throughput"), "PASS")
OPTIONS = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "accumulated, short end": {"accumulate_grad_batches": 4},
    "validated": {"validation": make_batches(2), "val_check_interval": 1},
    "clipped and validated": {"gradient_clip_val": 1e-3, "validation": make_batches(1), "val_check_interval": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_sound_run_is_green(options):
    module = Validated() if "validation" in OPTIONS[options] else Toy()
    callbacks = _watched(module)
    fit(module, make_batches(6), callbacks, **OPTIONS[options])
    verdict = judge(callbacks)
    assert _statuses(verdict) == ALL_GREEN, str(verdict)
    assert verdict.passed
    verdict.require()
    assert len(str(verdict).splitlines()) == 4
    assert "free" not in verdict["gradient_parity"].measured
    assert "(this run)" in verdict["throughput"].measured


def test_the_twin_drops_the_same_elements():
    """Toy has dropout: gradients that equal the reference's to 1e-6 need the masks of the watched forward."""
    module = Toy()
    parity = _parity(module)
    fit(module, make_batches(3), [parity])
    assert [row.step for row in parity.rows if row.parameter == "head.weight"] == [0, 2]
    assert max(row.relative_error for row in parity.rows) == 0.0


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")  # the batches here start again
@pytest.mark.parametrize("forgets", [False, True], ids=["with state", "callbacks new to the checkpoint"])
def test_resumed_training_is_judged(tmp_path, forgets):
    first, path = Toy(), tmp_path / "a.ckpt"
    fit(first, make_batches(4), [*([] if forgets else _watched(first)), Saver(path)], max_steps=2)
    resumed = Toy()
    callbacks = _watched(resumed)
    fit(resumed, make_batches(5), callbacks, ckpt_path=path, weights_only=True)
    verdict = judge(callbacks)
    assert [row.step for row in verdict.record.steps] == ([2, 3, 4] if forgets else [0, 1, 2, 3, 4])
    assert _statuses(verdict) == ALL_GREEN, str(verdict)


def test_wrong_gradients_are_red():
    module = Toy()
    parity = _parity(module)

    def negate(parameter):
        parameter.grad[2] *= -1

    module.head.weight.register_post_accumulate_grad_hook(negate)
    callbacks = [LossTracker(), Finite(), parity]
    fit(module, make_batches(3), callbacks)
    verdict = judge(callbacks)
    assert _statuses(verdict) == {"gradient_parity": "FAIL", "finite": "PASS"}
    assert "head.weight" in verdict["gradient_parity"].where
    with pytest.raises(AssertionError, match=r"^FAIL gradient_parity: relative error.*head\.weight") as red:
        verdict.require()
    assert "finite" not in str(red.value)
    verdict.require("finite")
    tolerant = {"gradient_error_max": 3.0, "gradient_error_median_max": 3.0}
    assert judge(callbacks, limits=tolerant)["gradient_parity"].status == "PASS"


def test_slices_and_quantized_layers():
    """A quantized layer is judged from both sides, and named slices have to be there."""

    class Coarse(Toy):
        def loss(self, batch):
            exact = self.inner.weight
            rounded = exact + (exact.to(torch.float8_e4m3fn).to(exact.dtype) - exact).detach()
            return torch.nn.functional.cross_entropy(
                torch.nn.functional.linear(self.embedding(batch["tokens"]), rounded).matmul(self.head.weight.T)
                .flatten(0, 1), batch["labels"].flatten(), ignore_index=-100,
            )  # fmt: skip

    class Fine(Coarse):
        def loss(self, batch):
            hidden = self.inner(self.embedding(batch["tokens"]))
            return torch.nn.functional.cross_entropy(
                self.head(hidden).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
            )

    module = Coarse()
    slices = {"inner.weight": [("head 0", 0, 4), ("head 1", 4, 8)]}
    quantized = {"head.weight", "inner.weight", "embedding.weight"}.__contains__
    parity = GradientParity(twin_reference(module, Fine(), _loss), slices=slices, quantized=quantized)
    fit(module, make_batches(3), [parity])
    limits = {"gradient_error_min": 1e-4}
    verdict = judge([parity], precision="fp8-tensorwise", limits=limits)
    assert _statuses(verdict) == {"gradient_parity": "PASS", "quantization_engaged": "PASS"}, str(verdict)
    assert "inner.weight[head" in verdict["gradient_parity"].where
    exact = Fine()
    parity = GradientParity(twin_reference(exact, Fine(), _loss), quantized=quantized)
    fit(exact, make_batches(3), [parity])
    assert judge([parity], precision="fp8-tensorwise")["quantization_engaged"].status == "FAIL"
    misspelt = GradientParity(twin_reference(module, Fine(), _loss), slices={"inner": [("head 0", 0, 4)]})
    fit(module, make_batches(1), [misspelt])
    assert judge([misspelt])["gradient_parity"].status == "ERROR"


def test_losses_beside_those_of_another_run():
    first, second, third = (LossTracker() for _ in range(3))
    fit(Toy(), make_batches(12), [first])
    fit(Toy(), make_batches(12), [second])
    reference = [sample.loss for sample in first.samples]
    same = judge([second], reference_losses=reference, limits={"loss_gap_max": 0.0})
    assert same["loss_tracking"].measured.startswith("median gap 0 nats")
    spoiled = Toy()
    torch.nn.init.zeros_(spoiled.inner.weight)
    fit(spoiled, make_batches(12), [third])
    assert judge([third], reference_losses=reference)["loss_tracking"].status == "FAIL"
    assert judge([third], reference_losses=reference[:-1])["loss_tracking"].status == "ERROR"


def test_what_was_not_measured_does_not_pass():
    fresh = _watched(Toy())
    assert set(_statuses(judge(fresh)).values()) == {"ERROR"}
    lonely = Finite()
    fit(Toy(), make_batches(2), [lonely])
    finding = judge([lonely])["finite"]
    assert (finding.status, finding.detail) == ("ERROR", "needs LossTracker among the callbacks")
    verdict = judge([lonely], checks=["gradient_presence"])
    assert verdict["gradient_presence"].detail == "needs GradientPresence among the callbacks"
    empty = Verdict((), verdict.record)
    assert not empty.passed
    with pytest.raises(AssertionError, match="nothing was judged"):
        empty.require()
    with pytest.raises(KeyError, match="telepathy was not judged; judged are gradient_presence"):
        verdict.require("telepathy")


@pytest.mark.parametrize(
    ("callbacks", "options", "message"),
    [
        ([], {}, "nothing to judge in no callback"),
        ([lightning.Callback(), LossTracker()], {}, "nothing to judge in Callback, LossTracker"),
        ([Finite(), Finite()], {}, "2 callbacks are Finite"),
        ([Finite()], {"checks": ["finit"]}, "no check 'finit' here; the nearest is finite"),
        ([Finite()], {"checks": []}, "nothing to judge"),
        ([Finite()], {"precision": "mxfp9"}, "the nearest is mxfp8"),
        ([Finite()], {"limits": {"gradient_error": 1.0}}, "no limit 'gradient_error'; the nearest is gradient_error_"),
    ],
)
def test_wrong_words_are_refused(callbacks, options, message):
    with pytest.raises(ValueError, match=message):
        judge(callbacks, **options)


def test_a_counter_of_own_leaves():
    counter = GemmCounter()
    counter.plan("inner", "e4m3 x e4m3")
    counter.plan("head", None, "the head stays")
    counter.count("head", "output", quantized=False)
    for gemm in ("output", "grad_input", "grad_weight"):
        counter.count("inner", gemm, quantized=True)
    coverage = Coverage(counter.rows)
    coverage.on_train_end(None, None)
    assert judge([coverage], precision="mxfp8").passed
    assert judge([coverage])["coverage"].status == "FAIL"  # quantized under bf16
    counter.count("inner", "output", quantized=False, replay=True)
    coverage.on_train_end(None, None)
    assert judge([coverage], precision="mxfp8")["coverage"].where == "inner output (replay)"
    counter.count("forgotten", "output", quantized=True)
    assert [row.planned for row in counter.rows() if row.module == "forgotten"] == [False] * 3
    with pytest.raises(ValueError, match="known are output, grad_input, grad_weight"):
        counter.count("inner", "dgrad", quantized=True)


def test_counts_go_on_after_a_resume():
    counter = GemmCounter()
    counter.plan("inner", "e4m3 x e4m3")
    counter.count("inner", "output", quantized=True)
    state = Coverage(counter.rows).state_dict()
    again = Coverage(counter.rows)  # the same process: its counter has counted that call already
    again.load_state_dict(state)
    counter.count("inner", "output", quantized=True)
    again.on_train_end(None, None)
    assert [row.quantized_calls for row in again.rows] == [2, 0, 0]
    fresh = GemmCounter()
    resumed = Coverage(fresh.rows)
    resumed.load_state_dict(state)
    fresh.plan("inner", "e4m3 x e4m3")
    fresh.count("inner", "output", quantized=True)
    resumed.on_exception(None, None, KeyboardInterrupt())
    assert [row.quantized_calls for row in resumed.rows] == [2, 0, 0]
    assert resumed.state_dict() == {"rows": [vars(row) for row in resumed.rows]}


def test_a_parameter_that_no_module_owns_is_looked_at():
    class Hidden(Toy):
        def __init__(self):
            super().__init__()
            self.extra = [torch.nn.Parameter(torch.ones(8))]  # a plain list: nobody finds it there

        def loss(self, batch):
            return super().loss(batch) + self.extra[0].sum() * 0

        def configure_optimizers(self):
            return torch.optim.SGD([*self.parameters(), *self.extra], lr=0.1)

    module = Hidden()
    callbacks = [LossTracker(), Finite(), GradientPresence()]
    fit(module, make_batches(2), callbacks)
    verdict = judge(callbacks)
    assert verdict["gradient_presence"].where == "optimizer 0 group 0 parameter 3 (no module owns it)"
    assert verdict["finite"].status == "PASS"

    def spoil(parameter):
        parameter.grad.fill_(math.nan)

    module.extra[0].register_post_accumulate_grad_hook(spoil)
    callbacks = [LossTracker(), Finite()]
    fit(module, make_batches(1), callbacks)
    assert "no module owns it" in judge(callbacks)["finite"].where
    assert math.isnan(callbacks[0].samples[0].grad_norm)


def test_batches_of_another_kind_need_their_own_count():
    class Pairs(Toy):
        def loss(self, batch):
            return super().loss(batch if isinstance(batch, dict) else {"tokens": batch[0], "labels": batch[1]})

    pairs = [(batch["tokens"], batch["labels"]) for batch in make_batches(2)]
    with pytest.raises(TypeError, match=r"type tuple has no tensor batch\[.labels.\].*counts=lambda"):
        fit(Pairs(), pairs, [LossTracker()])
    loss = LossTracker(counts=lambda batch: (int((batch[1] >= 0).sum()), batch[1].numel()))
    fit(Pairs(), pairs, [loss])
    assert [sample.tokens for sample in loss.samples] == [8, 7]


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_batch_that_training_step_skips():
    class Skipping(Toy):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    module = Skipping()
    parity = _parity(module, every=1)
    callbacks = [LossTracker(), parity]
    fit(module, make_batches(4), callbacks, accumulate_grad_batches=2)
    assert [sample.loss for sample in callbacks[0].samples] == [module.seen[0], sum(module.seen[1:]) / 2]
    assert judge(callbacks)["gradient_parity"].status == "PASS"


@pytest.mark.parametrize("callback", [LossTracker(), GradientParity(lambda batch, tape: {})])
def test_manual_optimization_is_refused(callback):
    class Manual(Toy):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match="sets automatic_optimization = False"):
        fit(Manual(), make_batches(1), [callback])


def test_a_reference_has_to_be_one():
    module = Toy()
    with pytest.raises(TypeError, match="'reference'"):
        GradientParity()
    with pytest.raises(TypeError, match=r"got Toy; twin_reference\(module, twin, loss\)"):
        GradientParity(Toy())
    with pytest.raises(ValueError, match="another instance"):
        twin_reference(module, module, _loss)
    smaller = Toy()
    smaller.head = torch.nn.Linear(8, 3, bias=False, device="meta")
    with pytest.raises(ValueError, match=r"head.weight is \(11, 8\) in the module, \(3, 8\) in the twin"):
        twin_reference(module, smaller, _loss)
    smaller.tail = smaller.head
    del smaller.head
    with pytest.raises(ValueError, match="head.weight is .*absent in the twin"):
        twin_reference(module, smaller, _loss)
    with pytest.raises(ValueError, match=r"no parameter of the watched module: it names x, .* embedding.weight"):
        fit(Toy(), make_batches(1), [GradientParity(lambda batch, tape: {"x": torch.zeros(3)})])
    with pytest.raises(ValueError, match=r"head.weight: gradient of shape \(11, 8\), reference of \(3,\)"):
        fit(Toy(), make_batches(1), [GradientParity(lambda batch, tape: {"head.weight": torch.zeros(3)})])


def test_twin_follows_train_and_eval_flags_and_buffers():
    class Normed(Toy):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(8)
            self.frozen = torch.nn.Dropout(0.5)

        def loss(self, batch):
            hidden = self.norm(self.frozen(self.inner(self.embedding(batch["tokens"]))).flatten(0, 1))
            return torch.nn.functional.cross_entropy(self.head(hidden), batch["labels"].flatten(), ignore_index=-100)

        def on_train_batch_start(self, batch, batch_idx):
            self.frozen.eval()

    module, twin = Normed(), Normed()
    parity = GradientParity(twin_reference(module, twin, _loss))
    fit(module, make_batches(2), [parity])
    assert max(row.relative_error for row in parity.rows) == 0.0
    assert int(module.norm.num_batches_tracked) == 2
    assert int(twin.norm.num_batches_tracked) == 0
    assert twin.training
    assert not twin.frozen.training


def test_the_readme_shows_what_works(monkeypatch, tmp_path):
    text = (pathlib.Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    code, _ = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    module = Toy()
    names = {"module": module, "twin": Toy(), "loader": Batches(make_batches(25))}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        exec(code, names)
    assert names["verdict"].passed
    assert len(module.seen) == 20
    assert list(tmp_path.iterdir()) == []
