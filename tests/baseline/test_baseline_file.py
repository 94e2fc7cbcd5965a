"""The baseline file: what is written reads back, a diff in git is one line a loss, what is wrong is one line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from smoke.baseline.file import BaselineError, Entry, read, text_of
from smoke.baseline.key import FIELDS

COSTS: dict[str, float | None] = {"tokens_per_s": 812.5, "peak_gib": None, "held_mib": 11.25}
LOSSES = tuple((step, (5.5 - 0.1 * step).hex()) for step in range(4))


def entry(**key: str) -> Entry:
    return Entry(
        key={name: key.get(name, f"{name} 1") for name in FIELDS},
        options={"precision": '"mxfp8"', "steps": "4"},
        reason="the first one",
        losses=LOSSES,
        costs=(COSTS,),
    )


def test_what_is_written_reads_back_bit_by_bit(tmp_path):
    file = tmp_path / "b.json"
    tiny = replace(entry(torch="2.12"), losses=((0, (5e-324).hex()), (1, (-0.0).hex()), (2, (1e300).hex())), costs=())
    file.write_text(text_of([entry(), tiny]), encoding="utf-8")
    assert set(map(repr, read(file) or ())) == {repr(entry()), repr(tiny)}
    assert text_of(read(file) or ()) == file.read_text(encoding="utf-8")


def test_the_order_of_recording_does_not_show():
    one, other = entry(), entry(torch="2.12")
    assert text_of([one, other]) == text_of([other, one])


def test_one_changed_loss_is_one_changed_line():
    before, changed = text_of([entry()]), replace(entry(), losses=(*LOSSES[:2], (2, (5.25).hex()), LOSSES[3]))
    lines = [
        line
        for line in difflib.unified_diff(before.splitlines(), text_of([changed]).splitlines(), n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert lines == [
        '-    {"step": 2, "hex": "0x1.5333333333333p+2", "loss": 5.3},',
        '+    {"step": 2, "hex": "0x1.5000000000000p+2", "loss": 5.25},',
    ]


def test_no_file_is_no_entry(tmp_path):
    assert read(tmp_path / "missing.json") is None


def _first(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda tree: change(tree["entries"][0])


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda tree: tree.update(version="2"), "is no baseline file"),
        (lambda tree: tree.pop("entries"), "is no baseline file"),
        (_first(lambda e: e.pop("reason")), "entry 1: must hold"),
        (_first(lambda e: e.update(more=1)), "entry 1: must hold"),
        (_first(lambda e: e.update(reason=" ")), "reason must say something"),
        (_first(lambda e: e["key"].pop("torch")), "its key must hold torch"),
        (_first(lambda e: e["key"].update(torch=2)), "its key must hold torch"),
        (_first(lambda e: e.update(losses=[])), "holds no loss"),
        (_first(lambda e: e["losses"].pop(1)), "loss 1 is not of step 1"),
        (_first(lambda e: e["losses"].append(e["losses"][0])), "loss 4 is not of step 4"),
        (_first(lambda e: e["losses"][1].update(step=True)), "loss 1 is not of step 1"),
        (_first(lambda e: e["losses"][2].update(hex="nan")), "step 2: hex and loss"),
        (_first(lambda e: e["losses"][2].update(hex="inf", loss=1e308)), "step 2: hex and loss"),
        (_first(lambda e: e["losses"][2].update(loss=5.31)), "step 2: hex and loss"),
        (_first(lambda e: e["losses"][2].update(hex="5.3")), "step 2: hex and loss"),
        (_first(lambda e: e["losses"][2].update(hex=None)), "step 2: hex and loss"),
        (_first(lambda e: e["costs"][0].update(peak_gib=-1)), "costs must be"),
        (_first(lambda e: e["costs"][0].update(peak_gib="1")), "costs must be"),
        (_first(lambda e: e["costs"][0].pop("peak_gib")), "costs must be"),
        (_first(lambda e: e.update(costs=e["costs"] * 21)), "costs must be 20 runs at most"),
        (lambda tree: tree["entries"].append(tree["entries"][0]), "entry 2: its key stands twice"),
    ],
)
def test_a_wrong_tree_is_one_line_that_names_the_place(tmp_path, spoil, named):
    file, tree = tmp_path / "b.json", json.loads(text_of([entry()]))
    spoil(tree)
    file.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(BaselineError, match=named) as caught:
        read(file)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--baseline {file}: ")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[",
        b"[" * 100_000,
        b"3",
        b'{"version": "1", "version": "1", "entries": []}',
        b'{"version": "1", "entries": [NaN]}',
        b'{"version": "1", "entries": [1' + b"0" * 5000 + b"]}",
        b"<<<<<<< ours\n{}\n=======\n{}\n>>>>>>> theirs\n",
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text):
    file = tmp_path / "b.json"
    file.write_bytes(text)
    with pytest.raises(BaselineError, match="is n|twice|no number") as caught:
        read(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "/dev/zero", "x" * 5000])
def test_what_is_no_file(name):
    with pytest.raises(BaselineError, match="--baseline"):
        read(name)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(BaselineError, match="is not a regular file"):
        read(tmp_path)
