"""The definition of mla_rope against complex arithmetic in float64; the API's checks."""

import subprocess
import sys

import pytest
import torch
from mla_rope_cases import POSITIONS, draw, key_value_oracle, query_oracle, relative_error, strided, tables

from smoke.kernels.mla_rope import reference
from smoke.kernels.mla_rope.api import rope_key_value, rope_query
from smoke.kernels.mla_rope.tables import Tables
from smoke.numerics import first_mismatch

HEADS = (1, 3, 5, 6, 12, 24, 40, 96, 128)
WIDTHS = ((0, 2), (5, 6), (3, 20), (17, 64))
EPSILON = {torch.float32: 4 * 2.0**-24, torch.float64: 8 * 2.0**-53}
"""Two products and a sum, each rounded, of numbers up to sqrt(2) larger than the result's largest."""
sizes = pytest.mark.parametrize(
    ("heads", "copied", "rope_dim"),
    [(heads, *WIDTHS[i % len(WIDTHS)]) for i, heads in enumerate(HEADS)] + [(4, *widths) for widths in WIDTHS],
)


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@sizes
def test_query_and_its_gradient(heads, copied, rope_dim, dtype):
    q = strided(draw(7, heads, copied + rope_dim, seed=3, dtype=dtype)).requires_grad_()
    upstream = strided(draw(*q.shape, seed=4, dtype=dtype))
    looked_up = tables(7, rope_dim)
    out = rope_query(q, *looked_up, rope_dim=rope_dim)
    (grad,) = torch.autograd.grad(out, q, upstream)
    want = query_oracle(q, *looked_up, rope_dim)
    (want_grad,) = torch.autograd.grad(want, q, upstream.double())
    assert out.dtype is grad.dtype is dtype
    assert out.is_contiguous()
    assert relative_error(out, want) <= EPSILON[dtype], "out"
    assert relative_error(grad, want_grad) <= EPSILON[dtype], "grad q"


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@sizes
def test_key_value_and_gradients(heads, copied, rope_dim, dtype):
    v_dim = 9
    kv = strided(draw(5, heads, copied + v_dim, seed=5, dtype=dtype)).requires_grad_()
    k_pe = strided(draw(5, rope_dim, seed=6, dtype=dtype)).requires_grad_()
    looked_up = tables(5, rope_dim)
    out = rope_key_value(kv, k_pe, *looked_up, nope_dim=copied, v_dim=v_dim)
    want = key_value_oracle(kv, k_pe, *looked_up, copied)
    upstream = [strided(draw(*part.shape, seed=7 + i, dtype=dtype)) for i, part in enumerate(out)]
    grads = torch.autograd.grad(out, (kv, k_pe), upstream)
    want_grads = torch.autograd.grad(want, (kv, k_pe), [u.double() for u in upstream])
    for name, got, expected in zip(("key", "value", "grad kv"), (*out, grads[0]), (*want, want_grads[0]), strict=True):
        assert got.dtype is dtype
        assert relative_error(got, expected) <= EPSILON[dtype], name
    assert relative_error(grads[1], want_grads[1]) <= EPSILON[dtype] * (2 + heads**0.5), "grad k_pe"


def test_explicit_gradients_are_autograds_of_the_definition():
    looked_up = Tables(*tables(6, 8))
    q, kv = (draw(6, 3, 13, seed=s, dtype=torch.float64).requires_grad_() for s in (1, 2))
    k_pe = draw(6, 8, seed=3, dtype=torch.float64).requires_grad_()
    upstream = draw(6, 3, 13, seed=4, dtype=torch.float64)
    (dq,) = torch.autograd.grad(reference.query(q, looked_up, 8), q, upstream)
    torch.testing.assert_close(reference.query(upstream, looked_up, 8, inverse=True), dq, rtol=1e-13, atol=1e-13)
    out = reference.key_value(kv, k_pe, looked_up, 5)
    upstreams = [draw(*part.shape, seed=5, dtype=torch.float64) for part in out]
    want = torch.autograd.grad(out, (kv, k_pe), upstreams)
    for got, expected in zip(reference.key_value_grad(*upstreams, looked_up, 5), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_layout_is_pairs_in_and_halves_out():
    quarter = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    q = torch.tensor([[[9.0, 1.0, 2.0, 3.0, 4.0]]])
    out = rope_query(q, *quarter, torch.zeros(1, dtype=torch.int64), rope_dim=4)
    assert out.tolist() == [[[9.0, -2.0, -4.0, 1.0, 3.0]]]


def test_bf16_is_float32_arithmetic_rounded_once():
    looked_up = tables(33, 20)
    q = draw(33, 5, 24, seed=1, dtype=torch.bfloat16).requires_grad_()
    upstream = draw(33, 5, 24, seed=2, dtype=torch.bfloat16)
    wide = q.detach().float().requires_grad_()
    out, out_wide = (rope_query(x, *looked_up, rope_dim=20) for x in (q, wide))
    assert first_mismatch(out, out_wide.bfloat16()) is None
    (grad,), (grad_wide,) = torch.autograd.grad(out, q, upstream), torch.autograd.grad(out_wide, wide, upstream.float())
    assert first_mismatch(grad, grad_wide.bfloat16()) is None
    kv, k_pe = draw(33, 40, 9, seed=3, dtype=torch.bfloat16), draw(33, 20, seed=4, dtype=torch.bfloat16)
    k_pe.requires_grad_()
    key, value = rope_key_value(kv, k_pe, *looked_up, nope_dim=5, v_dim=4)
    assert key.dtype is value.dtype is torch.bfloat16
    key_upstream = draw(*key.shape, seed=5, dtype=torch.bfloat16)
    (grad,) = torch.autograd.grad(key, k_pe, key_upstream)
    wide = k_pe.detach().float().requires_grad_()
    key_wide, _ = rope_key_value(kv.float(), wide, *looked_up, nope_dim=5, v_dim=4)
    (grad_wide,) = torch.autograd.grad(key_wide, wide, key_upstream.float())
    assert first_mismatch(grad, grad_wide.bfloat16()) is None, "the sum over heads is taken in float32"


def test_only_tables_and_positions_are_saved():
    looked_up = tables(7, 6)
    saved = []
    q, kv, k_pe = (draw(7, *rest, seed=1).requires_grad_() for rest in ((3, 10), (3, 9), (6,)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rope_query(q, *looked_up, rope_dim=6)
        rope_key_value(kv, k_pe, *looked_up, nope_dim=4, v_dim=5)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in looked_up}


def test_outputs_share_no_storage_with_inputs():
    kv, k_pe = draw(4, 2, 6, seed=1), draw(4, 6, seed=2)
    key, value = rope_key_value(kv, k_pe, *tables(4, 6), nope_dim=0, v_dim=6)
    assert len({t.untyped_storage().data_ptr() for t in (kv, k_pe, key, value)}) == 4


def test_no_tokens_give_no_tokens():
    assert rope_query(draw(0, 3, 8, seed=1), *tables(0, 6), rope_dim=6).shape == (0, 3, 8)


def ask(q=None, rope_dim=6, impl="reference", table=None, **changes):
    cos, sin, positions = table or tables(4, 6)
    named = {"cos": cos, "sin": sin, "positions_T": positions} | changes
    return rope_query(draw(4, 3, 10, seed=1) if q is None else q, rope_dim=rope_dim, impl=impl, **named)


def positions(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_dim": 7}, r"7 rotated columns: .* nearest legal is 6 or 8"),
        ({"rope_dim": 0}, r"0 rotated columns: .* nearest legal is 2"),
        ({"q": torch.zeros(4, 3, 5)}, r"rope_dim 6: q has 5 columns; the nearest legal is 4"),
        ({"q": torch.zeros(4, 10)}, r"q \(4, 10\) torch.float32: it must be \[tokens, heads, columns\]"),
        ({"q": torch.zeros(4, 3, 10, dtype=torch.int32)}, "of a floating type"),
        ({"rope_dim": 8}, r"cos \(97, 3\) and sin \(97, 3\): 8 rotated columns take two tables \[positions, 4\]"),
        ({"sin": torch.zeros(97, 6)}, r"sin \(97, 6\): 6 rotated columns"),
        ({"positions_T": positions(0, 1, 2)}, r"positions \(3,\) torch.int64: 4 tokens take \[4\] of torch.int64"),
        ({"positions_T": positions(0, 1, 2, 3, dtype=torch.int32)}, r"\(4,\) torch.int32: 4 tokens"),
        ({"positions_T": positions(0, 1, 2, POSITIONS)}, r"positions 0 to 97: the tables hold 0 to 96"),
        ({"positions_T": positions(0, -1, 2, 3)}, r"positions -1 to 3: the tables hold 0 to 96"),
        ({"cos": torch.zeros(97, 3, device="meta")}, "are on cpu, meta; they must be on one"),
        ({"impl": "cuda"}, "impl 'cuda': there are reference and triton"),
    ],
)
def test_query_requests_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        ask(**changes)


@pytest.mark.parametrize(
    ("k_pe", "split", "message"),
    [
        (torch.zeros(4, 6), (5, 5), r"nope_dim 5 \+ v_dim 5: kv has 9 columns; for this nope_dim v_dim is 4"),
        (torch.zeros(3, 6), (5, 4), r"k_pe \(3, 6\) torch.float32: kv \(4, 3, 9\) torch.float32 takes \[4, R\]"),
        (torch.zeros(4, 1, 6), (5, 4), r"k_pe \(4, 1, 6\)"),
        (torch.zeros(4, 6, dtype=torch.bfloat16), (5, 4), r"k_pe \(4, 6\) torch.bfloat16"),
        (torch.zeros(4, 5), (5, 4), "5 rotated columns"),
    ],
)
def test_key_value_requests_that_cannot_be(k_pe, split, message):
    with pytest.raises(ValueError, match=message):
        rope_key_value(draw(4, 3, 9, seed=1), k_pe, *tables(4, 6), nope_dim=split[0], v_dim=split[1])


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
import torch
from smoke.kernels.mla_rope.api import rope_query
arguments = torch.ones(2, 1, 4), torch.ones(3, 2), torch.ones(3, 2), torch.zeros(2, dtype=torch.int64)
print(tuple(rope_query(*arguments, rope_dim=4).shape))
try:
    rope_query(*arguments, rope_dim=4, impl="triton")
except ValueError as error:
    print(error)
"""


def test_works_without_triton_and_says_what_is_missing():
    result = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "(2, 1, 4)",
        "impl triton: the package triton is not installed; impl reference runs everywhere",
    ]


def test_triton_on_cpu_tensors_is_refused():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="impl triton: the tensors are on cpu; Triton needs a GPU"):
        ask(impl="triton")
