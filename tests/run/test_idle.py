"""Experts of which no gradient is expected: those without a token whose label counts."""

from __future__ import annotations

from dataclasses import replace

import torch
from small_runs import SMALL, finding, red

from smoke.run.idle import without_work


def test_an_expert_works_only_for_tokens_whose_label_counts():
    experts_TK = torch.tensor([[0, 1], [1, 2], [3, 0]])
    assert without_work(experts_TK, torch.tensor([True, True, False]), 5) == [3, 4]
    assert without_work(experts_TK, torch.tensor([True, True, True]), 5) == [4]
    assert without_work(experts_TK, torch.tensor([False, False, False]), 5) == [0, 1, 2, 3, 4]


def test_many_experts_with_one_choice_are_no_false_alarm(run):
    """Expert 14 of the prediction module gets, in one step, only a token whose label is ignored."""
    model = replace(SMALL, n_routed_experts=16, num_experts_per_tok=1)
    report = run(precision="nvfp4", layout="thd", steps=10, recompute=("layernorm",), model=model)
    assert red(report) == set()
    assert finding(report, "gradient_presence")["status"] == "PASS"
