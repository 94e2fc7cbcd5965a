"""What rope_contract measures: green as it is, each fault of tables, scales, pairs and positions seen."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_runs import small_session

from smoke.checks.rope import POSITIONS, rope_contract
from smoke.config import ModelConfig, RopeScaling
from smoke.kernels.mla_rope import reference
from smoke.record import Record
from smoke.run import rope, rope_kernels
from smoke.run.rope_cases import UNEQUAL, odd_cases
from smoke.run.rope_oracle import joined, softmax_scale, turn, turned_back, turns

MODEL = ModelConfig(max_position_embeddings=100)
SMALL_SIZES = ((3, 5, 20), (5, 0, 2))


def judged(monkeypatch, **changes):
    monkeypatch.setattr(rope, "SIZES", SMALL_SIZES)
    session = small_session(**changes)
    return rope_contract(Record(rope=rope.rope_rows(session)), session.plan, None)


@pytest.mark.parametrize("scaling", [RopeScaling(), UNEQUAL, None], ids=["equal", "unequal", "none"])
def test_the_model_as_it_is_is_green(monkeypatch, scaling):
    session = small_session()
    model = dataclasses.replace(session.plan.config.model, rope_scaling=scaling)
    finding = judged(monkeypatch, model=model)
    assert finding.status == "PASS", finding


def test_every_size_is_green_in_both_types():
    rows = [
        row
        for case in odd_cases("reference", "cpu", MODEL, rope_kernels.SIZES)
        for row in rope_kernels.operation_rows(case)
    ]
    assert {"float32", "bfloat16"} == {row.case.rpartition(", ")[2] for row in rows}
    assert max(row.value for row in rows if row.kind in ("forward", "gradient")) <= 3.0
    assert all(row.value == 0.0 for row in rows if row.kind not in ("forward", "gradient"))


def test_the_oracle_at_numbers_known_by_hand():
    plain = ModelConfig(qk_rope_head_dim=4, rope_theta=100.0, rope_scaling=None)
    assert turn(plain, 0, 1) == 1.0
    assert turn(plain, 3, 0) == pytest.approx(complex(-0.9899924966, 0.1411200081))
    assert turn(plain, 3, 1) == pytest.approx(complex(0.9553364891, 0.2955202067))  # 0.3 radians
    yarn = dataclasses.replace(plain, rope_scaling=RopeScaling(mscale=0.5, mscale_all_dim=2.0))
    assert abs(turn(yarn, 7, 0)) == pytest.approx((1 + 0.05 * 3.6888794541) / (1 + 0.2 * 3.6888794541))
    assert softmax_scale(yarn) == pytest.approx((1 + 0.2 * 3.6888794541) ** 2 / 6)


def test_the_oracles_gradient_is_that_of_its_values():
    turned = turns(MODEL, (0, 3, 50))
    x_TNR = torch.randn(3, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    dout_TNR = torch.randn(3, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradient = torch.autograd.grad(joined(x_TNR[..., :0], x_TNR, turned), x_TNR, dout_TNR)[0]
    torch.testing.assert_close(gradient, turned_back(dout_TNR, turned), rtol=1e-12, atol=1e-12)


def failing(monkeypatch):
    finding = judged(monkeypatch)
    assert finding.status == "FAIL"
    return finding


def test_mscale_dropped_from_the_softmax_scale(monkeypatch):
    monkeypatch.setattr("smoke.model.mla.softmax_scale", lambda c: (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5)
    assert "softmax scale" in failing(monkeypatch).where


def test_mscale_on_the_tables_as_well(monkeypatch):
    magnitude = "smoke.model.rope.table_magnitude"
    monkeypatch.setattr(magnitude, lambda scaling: 1.0 if scaling is None else 1.0 + 0.3689 * scaling.mscale)
    assert "cos and sin at position 0" in failing(monkeypatch).where


def test_corrections_that_only_equal_ones_hide(monkeypatch):
    monkeypatch.setattr("smoke.model.rope.table_magnitude", lambda scaling: 1.0)
    assert "unequal" in failing(monkeypatch).where


def test_halves_rotated_in_place_of_neighbours(monkeypatch):
    def half_split(x, tables, inverse=False):
        halves = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return pairs(x, tables, inverse) if inverse else pairs(halves, tables)

    pairs = reference.rotate
    monkeypatch.setattr(reference, "rotate", half_split)
    assert failing(monkeypatch).where.startswith("rope_query: query at position")


def test_a_table_that_is_too_narrow(monkeypatch):
    from smoke.model import deepseek

    full = deepseek.rope_table
    monkeypatch.setattr(deepseek, "rope_table", lambda *a, **k: tuple(t[:, :-1] for t in full(*a, **k)))
    assert failing(monkeypatch).where.startswith("15 columns for 16 rotated pairs")


def test_angles_in_float32_are_seen_far_out_only(monkeypatch):
    def single(config, device=None, *, length=None):
        frequencies = rope_frequencies(config).float()
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        return angles.cos(), angles.sin()

    from smoke.model.rope import inverse_frequencies as rope_frequencies

    monkeypatch.setattr(rope, "rope_table", single)
    rows = [row for row in rope.table_rows(MODEL) if row.kind == "table" and "unequal" not in row.case]
    assert [row.position for row in rows] == list(POSITIONS)
    assert rows[0].value <= 1.0 < 100.0 < rows[3].value


def test_positions_that_do_not_restart(monkeypatch):
    monkeypatch.setattr(rope, "positions_packed", lambda edges: torch.arange(int(edges[-1])))
    assert failing(monkeypatch).where.endswith("(packed)")


def test_context_parallel_ranks_without_the_zigzag(monkeypatch):
    monkeypatch.setattr(
        rope, "positions_context_parallel", lambda n, size, rank: torch.arange(n // size) + rank * (n // size)
    )
    assert "context-parallel rank 0 of 3" in failing(monkeypatch).where


def test_an_input_that_is_overwritten(monkeypatch):
    query = reference.query

    def careless(q, tables, rope_dim, inverse=False):
        out = query(q, tables, rope_dim, inverse)
        q.mul_(0.5)
        return out

    monkeypatch.setattr(reference, "query", careless)
    assert "input" in {
        row.kind for row in _spoiled_rows() if row.kind in ("input", "repeat") and row.value and "query" in row.tensor
    }


def test_elements_that_are_not_written(monkeypatch):
    query = reference.query

    def partial(q, tables, rope_dim, inverse=False):
        out = q.new_empty(q.shape)
        out[..., :-1] = query(q, tables, rope_dim, inverse)[..., :-1]
        return out

    monkeypatch.setattr(reference, "query", partial)
    assert any(row.kind == "unwritten" and row.value == 2 * 4 * 3 for row in _spoiled_rows())


def _spoiled_rows():
    (case,) = odd_cases("reference", "cpu", MODEL, SMALL_SIZES[:1])
    return rope_kernels.operation_rows(case)
