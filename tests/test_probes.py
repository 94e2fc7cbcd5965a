"""Two tapes of module calls, and where they part."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from smoke.probes import beyond, departures, tensors_of, watching


class Scaled(nn.Module):
    """x times a weight; ``wrong`` spoils one column of the output, or of the gradient that flows back."""

    def __init__(self, wrong: str = ""):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        if self.wrong == "forward":
            y = y + torch.tensor([0.0, 0.0, 0.5, 0.0])
        if self.wrong == "gradient":
            y.register_hook(lambda gradient: gradient * torch.tensor([1.0, 1.0, 1.0, 3.0]))
        return y


class Block(nn.Module):
    """Two scalings with an operation between them that belongs to no module."""

    def __init__(self, first: str = "", between: float = 1.0, second: str = ""):
        super().__init__()
        self.first, self.second, self.between = Scaled(first), Scaled(second), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).sin() * self.between)


SLICES = {"first.weight": [("low", 0, 2), ("high", 2, 4)], "second.weight": [("low", 0, 2), ("high", 2, 4)]}
X = torch.arange(12.0).reshape(3, 4)


def tape_of(block: Block):
    with watching(block) as tape:
        block(X).sum().backward()
    parameters = reversed(list(block.named_parameters()))
    tape.parameter = {(name, 0, 0): p.grad for name, p in parameters if p.grad is not None}
    return tape


def first(left: Block, right: Block, **how):
    return {found.passed: found for found in departures(tape_of(left), tape_of(right), slices=SLICES, **how)}


def test_equal_runs_do_not_part():
    assert first(Block(), Block()) == {}


def test_the_innermost_module_whose_forward_departs_is_named_with_its_slice():
    found = first(Block(second="forward"), Block())
    forward = found["forward"]
    assert (forward.module, forward.slice, forward.first_index) == ("second", "high", (0, 2))
    assert (forward.inputs_agree, forward.after) == (True, "first")
    assert (forward.mismatches, forward.elements) == (3, 12)
    assert set(found) == {"forward"}


def test_what_no_module_owns_is_found_between_two_calls():
    forward = first(Block(between=1.5), Block())["forward"]
    assert (forward.module, forward.inputs_agree, forward.after) == ("second", False, "first")


def test_the_first_gradient_that_departs_is_the_first_of_the_backward():
    found = first(Block(second="gradient"), Block())
    assert set(found) == {"gradient", "parameter"}
    assert (found["gradient"].module, found["gradient"].slice) == ("second", "high")
    assert found["parameter"].module == "second.weight"
    inner = first(Block(first="gradient"), Block())
    assert (inner["gradient"].module, inner["gradient"].after) == ("first", "second")
    assert (inner["parameter"].module, inner["parameter"].slice) == ("first.weight", "high")


def test_a_tolerance_forgives_what_is_within_it():
    assert first(Block(between=1.0 + 1e-6), Block(), departs=beyond(1e-3)) == {}
    assert set(first(Block(between=1.5), Block(), departs=beyond(1e-3))) >= {"forward"}
    nan = first(Block(between=float("nan")), Block(), departs=beyond(1e9))
    assert nan["forward"].module == "second"


def test_a_call_that_one_side_alone_makes():
    shorter = Block()
    shorter.forward = lambda x: shorter.first(x)
    found = first(shorter, Block())["forward"]
    assert (found.module, found.left_hex, found.after) == ("second", "absent", "first")
    assert "forward" in first(shorter, Block(), same_calls=False)  # the outermost output itself differs


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_replay_is_held_against_its_own_first_pass(spoiled):
    block, replaying = Block(), [False]

    @contextlib.contextmanager
    def replay():
        replaying[0] = True
        yield
        replaying[0] = False

    with watching(block, lambda: replaying[0]) as tape:
        hidden = block.first(X)
        block.second(hidden).sum().backward()
        block.second.wrong = "forward" if spoiled else ""
        with replay():
            block.second(hidden)
    assert set(tape.replay) == {("second", 0, 0)}
    found = departures(tape, tape)
    assert [(d.passed, d.module) for d in found] == ([("replay", "second")] if spoiled else [])


def test_rows_of_one_sequence():
    tape = tape_of(Block()).part((1, 3), 3)
    assert tape.forward["second", 0, 0].shape == (2, 4)
    assert not tape.parameter  # four rows are no tokens


def test_hooks_go_and_change_nothing():
    plain, watched = Block(), Block()
    plain(X).sum().backward()
    with watching(watched):
        watched(X).sum().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, watched.get_parameter(name).grad)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())


def test_tensors_in_nested_outputs():
    from smoke.model.routing import Routing

    a, b = torch.zeros(1), torch.ones(1)
    assert list(tensors_of((a, [b], {"x": a}, None, 3))) == [a, b, a]
    assert len(list(tensors_of(Routing(a, b, a, b)))) == 4
