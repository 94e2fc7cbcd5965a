"""DtypeLedger: what each module has, in which type, first seen when; hooks are gone when training is over."""

from __future__ import annotations

import pytest
import torch
from callback_toys import Toy, fit, make_batches

from smoke.callbacks import DtypeLedger


def _kinds(ledger: DtypeLedger, module: str) -> dict[str, tuple[str, int, int]]:
    return {row.kind: (row.dtype, row.step, row.tensors) for row in ledger.rows() if row.module == module}


def test_every_kind_of_every_module():
    module, ledger = Toy(), DtypeLedger()
    module.register_buffer("load", torch.zeros(3))
    module.register_buffer("choices", torch.zeros(3, dtype=torch.int64))
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), lr=0.1)
    fit(module, make_batches(3), [ledger])
    assert ledger.steps == 3
    assert _kinds(ledger, "inner") == {
        "parameter": ("float32", 0, 4),  # before the first step and after each one
        "input": ("float32", 0, 3),
        "activation": ("float32", 0, 3),
        "gradient": ("float32", 0, 3),
        "moment": ("float32", 0, 9),  # two moments and the step count
    }
    assert _kinds(ledger, "") == {"buffer": ("float32", 0, 4)}
    assert _kinds(ledger, "training step") == {"loss": ("float32", 0, 3)}
    assert "input" not in _kinds(ledger, "embedding")  # integers
    assert not any(m._forward_hooks for m in module.modules())


def test_a_type_that_slips_in_one_step_is_a_row_of_its_own():
    class Narrow(torch.nn.Identity):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x.bfloat16() if self.calls == 3 else x

    module, ledger = Toy(), DtypeLedger()
    module.dropout = Narrow()
    module.head.register_forward_pre_hook(lambda leaf, args: (args[0].float(),))
    fit(module, make_batches(4), [ledger])
    rows = [(row.dtype, row.step, row.tensors) for row in ledger.rows() if row.module == "dropout"]
    assert ("float32", 0, 3) in rows
    assert ("bfloat16", 2, 1) in rows


def test_masters_are_what_the_caller_reads_off_the_optimizer():
    module = Toy()
    masters = {id(p): p.detach().bfloat16() for p in module.parameters()}
    ledger = DtypeLedger(
        lambda optimizer: [(p, "master", masters[id(p)]) for g in optimizer.param_groups for p in g["params"]]
    )
    fit(module, make_batches(1), [ledger])
    assert _kinds(ledger, "head")["master"] == ("bfloat16", 0, 1)


def test_state_goes_through_a_checkpoint():
    ledger, other = DtypeLedger(), DtypeLedger()
    fit(Toy(), make_batches(2), [ledger])
    other.load_state_dict(ledger.state_dict())
    assert other.rows() == ledger.rows()
    assert other.steps == 2


def test_hooks_are_removed_when_training_breaks_off():
    module, ledger = Toy(), DtypeLedger()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)

    def breaks(batch, batch_idx):
        raise RuntimeError("stop here")

    module.training_step = breaks
    with pytest.raises(RuntimeError, match="stop here"):
        fit(module, make_batches(1), [ledger])
    assert not any(m._forward_hooks for m in module.modules())
