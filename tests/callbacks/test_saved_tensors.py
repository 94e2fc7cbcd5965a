"""SavedTensors: takes over what the hooks found, one row a place, and keeps it through a checkpoint."""

from types import SimpleNamespace

import torch

from smoke.callbacks import SavedTensors


def write(place: str, shape: tuple[int, ...] = (2, 3)) -> SimpleNamespace:
    return SimpleNamespace(place=place, shape=shape, dtype=torch.bfloat16, saved_version=1, version=4)


class Hooks:
    """What owns the hooks: writes to take, and a count."""

    def __init__(self) -> None:
        self.writes: list[SimpleNamespace] = []
        self.looked = 50

    def take(self) -> list[SimpleNamespace]:
        taken, self.writes = self.writes, []
        return taken


def step(callback: SavedTensors, hooks: Hooks, number: int, *places: str) -> None:
    hooks.writes += map(write, places)
    hooks.looked += 10
    callback.on_before_optimizer_step(SimpleNamespace(global_step=number), None, None)


def test_first_row_of_each_place_by_step_and_counts_of_training_alone():
    hooks = Hooks()
    callback = SavedTensors(hooks.take, lambda: hooks.looked)
    hooks.writes = [write("a"), write("a")]
    callback.on_train_start(None, None)
    step(callback, hooks, 0)
    step(callback, hooks, 1, "b", "a", "b")
    step(callback, hooks, 2, "a", "b")
    assert [(row.step, row.place) for row in callback.rows] == [(None, "a"), (1, "b"), (1, "a")]
    assert (callback.rows[0].dtype, callback.rows[0].saved_version, callback.rows[0].version) == ("bfloat16", 1, 4)
    assert (callback.looked, callback.steps) == (30, 3)


def test_what_backward_found_before_it_broke_off_is_kept():
    hooks = Hooks()
    callback = SavedTensors(hooks.take, lambda: hooks.looked)
    hooks.writes = [write("a")]
    callback.on_exception(SimpleNamespace(global_step=7), None, RuntimeError())
    assert [(row.step, row.place) for row in callback.rows] == [(7, "a")]


def test_state_survives_a_checkpoint_and_counting_goes_on(tmp_path):
    hooks = Hooks()
    callback = SavedTensors(hooks.take, lambda: hooks.looked)
    callback.on_train_start(None, None)
    step(callback, hooks, 0, "a")
    torch.save(callback.state_dict(), tmp_path / "state.pt")
    hooks = Hooks()
    again = SavedTensors(hooks.take, lambda: hooks.looked)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.rows == callback.rows
    again.on_train_start(None, None)
    step(again, hooks, 1, "a", "b")
    assert [(row.step, row.place) for row in again.rows] == [(0, "a"), (1, "b")]
    assert (again.looked, again.steps) == (20, 2)
