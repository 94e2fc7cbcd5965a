"""Absorbed query and key against a float64 einsum; absorbed scores are the plain form's scores."""

import pytest
import torch
from mla_rope_cases import draw, key_value_oracle, relative_error, rotated, strided, tables

from smoke.kernels.absorb import reference
from smoke.kernels.absorb.api import absorbed_key, absorbed_query
from smoke.kernels.mla_rope.api import rope_key_value, rope_query
from smoke.kernels.mla_rope.tables import Tables
from smoke.model.linear import HeadwiseLinear
from smoke.numerics import first_mismatch

TOKENS, NOPE, LATENT, ROPE = 7, 5, 9, 6


def inputs(heads, dtype=torch.float32):
    """q, K-up weight by head, latent, k_pe: strided, requiring gradients."""
    shapes = ((TOKENS, heads, NOPE + ROPE), (heads, LATENT, NOPE), (TOKENS, LATENT), (TOKENS, ROPE))
    return [strided(draw(*shape, seed=i, dtype=dtype)).requires_grad_() for i, shape in enumerate(shapes)]


def looked_up():
    return dict(zip(("cos", "sin", "positions_T"), tables(TOKENS, ROPE), strict=True))


def absorbed(q, weight, latent, k_pe, **options):
    leaf = HeadwiseLinear(q.shape[1], NOPE, LATENT)
    query = absorbed_query(q, lambda x: leaf(x, weight), nope_dim=NOPE, **looked_up(), **options)
    return query, absorbed_key(latent, k_pe, **looked_up(), **options)


def oracle(q, weight, latent, k_pe):
    """Both joins in float64, by einsum and complex rotation."""
    up = torch.einsum("tnk,nlk->tnl", q[..., :NOPE].double(), weight.double())
    query = torch.cat((up, rotated(q[..., NOPE:], *tables(TOKENS, ROPE))), dim=-1)
    pe = rotated(k_pe.unsqueeze(1), *tables(TOKENS, ROPE))
    return query, torch.cat((latent.double().unsqueeze(1), pe), dim=-1)


@pytest.mark.parametrize("heads", [1, 3, 12])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
def test_joins_and_gradients(heads, dtype, limit):
    given = inputs(heads, dtype)
    found, wanted = absorbed(*given), oracle(*given)
    upstream = [strided(draw(*part.shape, seed=20, dtype=dtype)) for part in found]
    grads = torch.autograd.grad(found, given, upstream)
    want_grads = torch.autograd.grad(wanted, given, [u.double() for u in upstream])
    names = ("query", "key", "grad q", "grad weight", "grad latent", "grad k_pe")
    for name, got, want in zip(names, (*found, *grads), (*wanted, *want_grads), strict=True):
        assert got.shape == want.shape
        assert got.dtype is dtype
        assert relative_error(got, want) <= limit, name


def test_absorbed_scores_are_plain_scores():
    q, weight, latent, k_pe = (x.detach() for x in inputs(3, torch.float64))
    query, key = absorbed(q, weight, latent, k_pe)
    kv = torch.einsum("sl,nlk->snk", latent, weight)
    positions = tables(TOKENS, ROPE)
    plain_key, _ = rope_key_value(kv, k_pe, *positions, nope_dim=NOPE, v_dim=0)
    plain = torch.einsum("tnd,snd->nts", rope_query(q, *positions, rope_dim=ROPE), plain_key)
    scores = torch.einsum("tnd,sd->nts", query, key.squeeze(1))
    torch.testing.assert_close(scores, plain, rtol=1e-12, atol=1e-12)
    oracle_key, _ = key_value_oracle(kv, k_pe, *positions, NOPE)
    torch.testing.assert_close(plain_key, oracle_key, rtol=1e-12, atol=1e-12)


def test_widening_changes_no_number_and_no_gradient():
    given = inputs(5, torch.bfloat16)
    narrow, wide = absorbed(*given), absorbed(*given, out_dtype=torch.float32)
    upstream = [draw(*part.shape, seed=21) for part in wide]
    for name, got, want in zip(("query", "key"), wide, narrow, strict=True):
        assert got.dtype is torch.float32
        assert first_mismatch(got, want.float()) is None, name
    grads = torch.autograd.grad(wide, given, upstream)
    want_grads = torch.autograd.grad([part.float() for part in narrow], given, upstream)
    for name, got, want in zip(("q", "weight", "latent", "k_pe"), grads, want_grads, strict=True):
        assert got.dtype is torch.bfloat16
        assert first_mismatch(got, want) is None, f"grad {name}"


def test_explicit_gradient_is_autograds_of_the_definition():
    positions = Tables(*tables(TOKENS, ROPE))
    latent, pe = (draw(TOKENS, 3, width, seed=width, dtype=torch.float64).requires_grad_() for width in (LATENT, ROPE))
    out = reference.join(latent, pe, positions, torch.float64)
    upstream = draw(*out.shape, seed=22, dtype=torch.float64)
    want = torch.autograd.grad(out, (latent, pe), upstream)
    for got, expected in zip(reference.join_grad(upstream, positions, ROPE, torch.float64), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_only_tables_and_positions_are_saved():
    q, _, latent, k_pe = inputs(3)
    up = draw(TOKENS, 3, LATENT, seed=23).requires_grad_()
    given = looked_up()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        absorbed_query(q, lambda _: up, nope_dim=NOPE, **given, out_dtype=torch.float64)
        absorbed_key(latent, k_pe, **given, out_dtype=torch.float64)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in given.values()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nope_dim": NOPE + ROPE}, r"nope_dim 11: q \(7, 3, 11\) must be \[tokens, heads, nope_dim \+ rotated\]"),
        ({"nope_dim": NOPE - 1}, "7 rotated columns: .* 6 or 8"),
        ({"k_up": lambda x: x[:, :1]}, r"latent part \(7, 1, 5\) .* beside rotated part \(7, 3, 6\)"),
        ({"k_up": lambda x: x.double()}, r"latent part \(7, 3, 5\) torch.float64 beside"),
        ({"impl": "fast"}, "impl 'fast': there are reference and triton"),
    ],
)
def test_query_requests_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        absorbed_query(**({"q_TND": inputs(3)[0], "k_up": lambda x: x, "nope_dim": NOPE} | looked_up() | changes))


def test_a_key_of_three_dimensions_is_refused():
    _, _, latent, k_pe = inputs(3)
    with pytest.raises(ValueError, match=r"latent \(7, 1, 9\) and k_pe \(7, 6\): both must be \[tokens, columns\]"):
        absorbed_key(latent.unsqueeze(1), k_pe, **looked_up())
