"""Two ranks under DDP, each in a process of its own: gradients of all ranks against a reference of all ranks."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from callback_toys import Toy

from smoke.callbacks import GradientParity

TESTS = pathlib.Path(__file__).resolve().parent
PROGRAM = """
import json, pathlib, sys, warnings

import lightning, torch
from callback_toys import Toy, make_batches

from smoke.callbacks import Finite, GradientParity, GradientPresence, LossTracker, twin_reference
from smoke.verdict import judge

warnings.filterwarnings("ignore")
module = Toy()
parity = GradientParity(twin_reference(module, Toy(), Toy.loss), every=2)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, accumulate_grad_batches=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[LossTracker(), Finite(), GradientPresence(), parity],
)
trainer.fit(module, torch.utils.data.DataLoader(make_batches(12), batch_size=None, shuffle=False))
verdict = judge(trainer.callbacks)
found = {
    "statuses": {finding.name: finding.status for finding in verdict.findings},
    "errors": [row.relative_error for row in parity.rows],
    "losses": [step.loss for step in verdict.record.steps],
}
pathlib.Path(sys.argv[1], f"{trainer.global_rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_two_ranks_with_ddp(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    path = os.pathsep.join((str(TESTS.parents[1]), str(TESTS)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    expected = dict.fromkeys(("gradient_parity", "finite", "gradient_presence"), "PASS")
    assert first["statuses"] == second["statuses"] == expected
    assert first["errors"] == second["errors"]
    assert first["losses"] != second["losses"]  # each rank has batches of its own


def test_sharded_gradients_are_refused():
    class Sharded:
        """A trainer of two ranks whose strategy is not DDP."""

        world_size, strategy = 2, object()

    with pytest.raises(ValueError, match="on several ranks it needs DDP, not object"):
        GradientParity(lambda batch, tape: {}).setup(Sharded(), Toy(), "fit")
