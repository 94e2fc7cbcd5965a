"""Batches whose labels give attention nothing to learn from are refused before training, with what to change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_runs import small_config

from smoke.config import DataConfig, ModelConfig
from smoke.data.sources import DataError
from smoke.environment import detect
from smoke.plan import resolve


def load(layout: str, rows: int, length: int, mtp: int = 1, source: str = "generated") -> int:
    from smoke.run.session import load_data

    data = DataConfig(source=source, sequence_length=length, micro_batch_size=rows)
    model = replace(ModelConfig(), num_nextn_predict_layers=mtp)
    config = small_config(precision="bf16", layout=layout, data=data, model=model)
    return len(load_data(resolve(config, detect()))[1])


@pytest.mark.parametrize(
    ("layout", "rows", "length", "mtp", "what"),
    [
        ("thd", 16, 2, 1, "next-token"),
        ("thd", 1, 2, 0, "next-token"),
        ("thd", 16, 3, 1, "multi-token-prediction"),
        ("sbhd", 1, 2, 1, "multi-token-prediction"),
    ],
)
def test_too_short_sequences_are_one_clear_line(layout, rows, length, mtp, what):
    with pytest.raises(DataError, match=f"no {what} label") as caught:
        load(layout, rows, length, mtp)
    assert "\n" not in str(caught.value)


def test_short_texts_are_refused_whatever_the_sequence_length(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n' * 2000, encoding="utf-8")
    with pytest.raises(DataError, match="its longest sequence has 2 tokens"):
        load("thd", 4, 64, source=f"jsonl:{file}")
    assert load("sbhd", 4, 64, source=f"jsonl:{file}") == 4


def test_one_token_repeated_is_refused(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("x" * 20_000, encoding="utf-8")
    with pytest.raises(DataError, match="every token of batch 0 is 120"):
        load("sbhd", 4, 64, source=f"text:{file}")


def test_the_twin_forms_do_not_depend_on_the_data(monkeypatch):
    """Rows of equal tokens have gradients of zero in attention; the parity checks bring tokens of their own."""
    from smoke.run import forms, session

    plan = resolve(small_config(precision="bf16", layout="thd"), detect())
    data, batches = session.load_data(plan)
    batches[0]["tokens"].fill_(120)
    built = session.build(plan, data, batches)
    rows = [*forms.absorbed_twins(built), *forms.packed_twins(built)]
    assert {row.kind for row in rows} == {"absorbed", "packed", "packed_leak"}
    assert max(row.relative_error for row in rows) < 1e-9


@pytest.mark.parametrize(("layout", "rows", "length", "mtp"), [("sbhd", 1, 3, 1), ("sbhd", 1, 2, 0), ("thd", 4, 8, 1)])
def test_the_shortest_legal_ones_load(layout, rows, length, mtp):
    assert load(layout, rows, length, mtp) == 4
