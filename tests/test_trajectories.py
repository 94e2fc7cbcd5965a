"""What a trajectory keeps, beyond what the runs of other tests show."""

from __future__ import annotations

import torch

from smoke.trajectories import compare, follow


class Counting(torch.nn.Module):
    """A weight, and a counter that the update reads and clears, as the routers' load is."""

    def __init__(self, counts: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("load", torch.zeros(2))
        self.counts = counts

    def step(self, batch, on_gradients):
        loss = (self.weight * batch).sum()
        loss.backward()
        self.load += self.counts
        on_gradients()
        self.weight.grad = None
        self.load.zero_()
        return loss


def test_a_counter_that_the_update_clears_is_compared_before_it():
    once, twice = Counting(1), Counting(2)
    batches = [torch.ones(2)] * 3
    left, right = (follow(module, module.step, batches) for module in (once, twice))
    differing = [row for row in compare("rerun", left, right) if not row.equal]
    assert [(row.step, row.quantity, row.name) for row in differing] == [
        (step, "weight", "load before the update") for step in range(3)
    ]
    assert all(row.equal for row in compare("rerun", left, follow(once, once.step, batches)))
