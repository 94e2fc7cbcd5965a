"""AttentionBackend: calls before training are forgotten, rows survive a checkpoint."""

import torch

from smoke.callbacks import AttentionBackend as Callback
from smoke.record import AttentionRow


class Counts:
    """What owns the counts."""

    def __init__(self, calls: int):
        self.calls = calls

    def rows(self) -> list[AttentionRow]:
        return [AttentionRow(module="a", backend="flash", dtype="float32", columns=8, calls=self.calls)]

    def forget(self) -> None:
        self.calls = 0


def test_calls_of_training_alone_are_kept_also_when_it_breaks_off():
    for end in (lambda c: c.on_train_end(None, None), lambda c: c.on_exception(None, None, RuntimeError())):
        counts = Counts(100)
        callback = Callback(counts.rows, counts.forget)
        callback.on_train_start(None, None)
        counts.calls += 7
        end(callback)
        assert [row.calls for row in callback.rows] == [7]


def test_rows_survive_a_checkpoint(tmp_path):
    counts = Counts(3)
    torch.save(Callback(counts.rows, counts.forget).state_dict(), tmp_path / "state.pt")
    counts = Counts(0)
    again = Callback(counts.rows, counts.forget)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    again.on_train_start(None, None)
    counts.calls += 2
    again.on_train_end(None, None)
    assert [row.calls for row in again.rows] == [5]
