"""Which kernel ran core attention is read off the graph, and counted for every call that records one."""

from collections import Counter

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from smoke.model.attention import Kernel, Sequences, backend_of, core_attention

FLASH, MATH = Kernel("flash", "float32", 8), Kernel("math", "float32", 8)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def attend(query, key, lengths, ran, **options):
    positions = torch.cat([torch.arange(n) for n in lengths])
    sequences = Sequences(tuple(lengths), positions)
    core_attention(query, key, sequences=sequences, scale=0.5, columns=4, out_dtype=torch.float32, ran=ran, **options)


@pytest.mark.parametrize(("lengths", "calls"), [((6, 6), 1), ((5, 6, 1), 3)])
def test_every_call_is_counted(lengths, calls):
    ran = Counter()
    attend(drawn(12, 3, 8), drawn(12, 1, 8, seed=2), lengths, ran)
    assert ran == {FLASH: calls}


@pytest.mark.parametrize("behind", [False, True], ids=["leaves", "behind another attention"])
def test_the_unfused_path_is_seen(behind):
    """The walk through the graph stops at the inputs: a fused attention in front does not count for this one."""
    ran = Counter()
    query = drawn(12, 3, 8)
    if behind:
        query = scaled_dot_product_attention(query, query, query) * 2
    with sdpa_kernel(SDPBackend.MATH):
        attend(query, drawn(12, 1, 8, seed=2), (12,), ran)
    assert ran == {MATH: 1}


def test_differing_widths_fall_to_the_unfused_path():
    x = drawn(1, 2, 6, 8)
    value = drawn(1, 2, 6, 12, seed=2)
    assert backend_of(scaled_dot_product_attention(x, x, value, is_causal=True), (x, value)) == "math"


def test_columns_padded_and_sliced_around_a_fused_kernel():
    x = drawn(1, 2, 6, 8)
    out = scaled_dot_product_attention(x, x, x, is_causal=True)[..., :5] * 1.0
    assert backend_of(out, (x,)) == "flash"


def test_without_a_graph_nothing_is_counted():
    ran = Counter()
    with torch.no_grad():
        attend(drawn(12, 3, 8), drawn(12, 1, 8, seed=2), (12,), ran)
    assert not ran
