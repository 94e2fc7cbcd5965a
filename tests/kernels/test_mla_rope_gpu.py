"""The Triton kernels on a GPU: the reference's bits in BF16 and float32, bounds, and addresses beyond 2^31 elements."""

import pytest
import torch
from mla_rope_cases import (
    POSITIONS,
    check_bounds,
    check_join,
    check_key_value,
    check_position_beyond_the_tables,
    check_query,
    tables,
)

from smoke.kernels.mla_rope import reference
from smoke.kernels.mla_rope.api import rope_key_value, rope_query
from smoke.kernels.mla_rope.tables import Tables
from smoke.numerics import first_mismatch

pytestmark = pytest.mark.gpu

HEADS = (1, 3, 5, 6, 12, 24, 40, 96, 128)
WIDTHS = ((0, 2), (5, 6), (130, 20), (128, 64), (17, 96))
sizes = pytest.mark.parametrize(
    ("heads", "copied", "rope_dim"),
    [(heads, *WIDTHS[i % len(WIDTHS)]) for i, heads in enumerate(HEADS)] + [(128, 128, 64), (16, 512, 64)],
)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.fixture(autouse=True)
def cuda():
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.init()


@dtypes
@sizes
def test_query(heads, copied, rope_dim, dtype):
    check_query("cuda", dtype, heads, copied, rope_dim)


@dtypes
@sizes
def test_key_value(heads, copied, rope_dim, dtype):
    check_key_value("cuda", dtype, heads, copied, rope_dim)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(("heads", "latent", "rope_dim"), [(1, 7, 6), (5, 130, 20), (128, 512, 64)])
def test_join(heads, latent, rope_dim, dtype, out_dtype):
    check_join("cuda", dtype, out_dtype, heads, latent, rope_dim)


@dtypes
@pytest.mark.parametrize("heads", [1, 3, 8, 12, 40])
def test_bounds(heads, dtype):
    check_bounds("cuda", dtype, heads)


def test_position_beyond_the_tables():
    check_position_beyond_the_tables("cuda")


def huge(*shape: int, tensors: int) -> torch.Tensor:
    """A BF16 tensor of more than 2^31 elements; skips when ``tensors`` such tensors do not fit."""
    free, _ = torch.cuda.mem_get_info()
    elements = torch.Size(shape).numel()
    assert elements > 2**31
    if free < 2 * elements * tensors + 2**30:
        pytest.skip(f"{tensors} tensors of {elements} elements need more than the {free / 2**30:.0f} GiB that are free")
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=torch.Generator("cuda"))


def ends(tensor: torch.Tensor) -> torch.Tensor:
    """The first and the last tokens."""
    return torch.cat((tensor[:4], tensor[-4:]))


def test_query_beyond_31_bits():
    heads, width, rope_dim = 128, 192, 64
    tokens = 2**31 // (heads * width) + 9
    # Heads outermost: both the token index and the head index reach beyond 2^31 elements.
    q = huge(heads, tokens, width, tensors=4).transpose(0, 1).requires_grad_()
    looked_up = Tables(*tables(tokens, rope_dim, "cuda"))
    at_ends = looked_up._replace(positions_T=ends(looked_up.positions_T))
    out = rope_query(q, *looked_up, rope_dim=rope_dim, impl="triton")
    assert first_mismatch(ends(out), reference.query(ends(q), at_ends, rope_dim)) is None
    (grad,) = torch.autograd.grad(out, q, q.detach())
    assert first_mismatch(ends(grad), reference.query(ends(q), at_ends, rope_dim, inverse=True)) is None


def test_key_value_beyond_31_bits():
    heads, nope, v_dim, rope_dim = 128, 128, 128, 64
    tokens = 2**31 // (heads * v_dim) + 9
    kv = huge(tokens, heads, nope + v_dim, tensors=5).requires_grad_()
    looked_up = Tables(*tables(tokens, rope_dim, "cuda"))
    at_ends = looked_up._replace(positions_T=ends(looked_up.positions_T))
    k_pe = kv.detach()[:, 0, :rope_dim].requires_grad_()
    out = rope_key_value(kv, k_pe, *looked_up, nope_dim=nope, v_dim=v_dim, impl="triton")
    want = reference.key_value(ends(kv), ends(k_pe), at_ends, nope)
    for name, got, expected in zip(("key", "value"), out, want, strict=True):
        assert got.numel() > 2**31
        assert first_mismatch(ends(got), expected) is None, name
    upstream = [part.detach() for part in out]
    dkv, dk_pe = torch.autograd.grad(out, (kv, k_pe), upstream)
    want = reference.key_value_grad(*(ends(part) for part in upstream), at_ends, nope)
    assert first_mismatch(ends(dkv), want[0]) is None, "grad kv"
    torch.testing.assert_close(ends(dk_pe), want[1], rtol=2.0**-7, atol=2.0**-7 * heads**0.5)


def test_long_tables_and_all_positions():
    positions = torch.arange(POSITIONS, device="cuda")
    cos, sin, _ = tables(POSITIONS, 64, "cuda")
    q = torch.ones(POSITIONS, 2, 64, dtype=torch.bfloat16, device="cuda")
    out = rope_query(q, cos, sin, positions, rope_dim=64, impl="triton")
    assert first_mismatch(out, reference.query(q, Tables(cos, sin, positions), 64)) is None
