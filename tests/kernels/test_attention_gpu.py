"""Absorbed attention on a GPU: both Triton implementations against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from attention_cases import LENGTHS, check, check_leak, inputs

pytestmark = pytest.mark.gpu
LIMIT = {torch.bfloat16: 4e-3, torch.float16: 1e-3}


def _implementations():
    from smoke.kernels.attention import triton as portable
    from smoke.kernels.attention.api import implementation

    best = implementation(torch.device("cuda", 0), 512)
    return {module.__name__.rpartition(".")[2]: module for module in (portable, best)}


@pytest.mark.parametrize("heads", [1, 3, 16, 128])
@pytest.mark.parametrize("name", ["triton", "triton_sm90"])
def test_heads_and_lengths(name, heads):
    module = _implementations().get(name) or pytest.skip("no sm_90 here")
    for lengths in (*LENGTHS.values(), (129, 64, 200), (321,)):
        check(module, lengths, heads, 512, 64, torch.bfloat16, "cuda", LIMIT[torch.bfloat16])


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(("latent", "rotated"), [(64, 32), (32, 16), (128, 64), (256, 16)])
@pytest.mark.parametrize("name", ["triton", "triton_sm90"])
def test_other_widths(name, latent, rotated, dtype):
    module = _implementations().get(name) or pytest.skip("no sm_90 here")
    check(module, (70, 1, 133), 5, latent, rotated, dtype, "cuda", LIMIT[dtype])


@pytest.mark.parametrize("name", ["triton", "triton_sm90"])
def test_long_sequences(name):
    module = _implementations().get(name) or pytest.skip("no sm_90 here")
    check(module, (4097,), 2, 512, 64, torch.bfloat16, "cuda", LIMIT[torch.bfloat16])


@pytest.mark.parametrize("name", ["triton", "triton_sm90"])
def test_sequences_do_not_meet(name):
    module = _implementations().get(name) or pytest.skip("no sm_90 here")
    check_leak(module, 7, 512, 64, torch.bfloat16, "cuda")


@pytest.mark.parametrize("name", ["triton", "triton_sm90"])
def test_addresses_beyond_32_bits(name):
    """More than 2^31 elements in query and output: the last sequence is as good as the same one alone."""
    module = _implementations().get(name) or pytest.skip("no sm_90 here")
    tokens, heads, tail = 32768, 128, 96
    lengths = (1,) * (tokens - tail) + (tail,)
    query, key, dout = inputs((tail,), heads, 512, 64, torch.bfloat16, "cuda")
    large = [torch.zeros(tokens, *x.shape[1:], dtype=x.dtype, device="cuda") for x in (query, key, dout)]
    for whole, part in zip(large, (query, key, dout), strict=True):
        whole[-tail:] = part
    assert large[0].numel() > 2**31
    out, lse = module.forward(large[0], large[1], lengths, 0.05, 512)
    gradients = module.backward(large[0], large[1], out, lse, large[2], lengths, 0.05)
    alone, alone_lse = module.forward(query, key, (tail,), 0.05, 512)
    alone_gradients = module.backward(query, key, alone, alone_lse, dout, (tail,), 0.05)
    assert torch.equal(out[-tail:], alone)
    for whole, part in zip(gradients, alone_gradients, strict=True):
        assert (whole[-tail:].float() - part.float()).norm() <= 1e-3 * part.float().norm()


def test_the_public_function_is_differentiable():
    from smoke.kernels.attention.api import attend

    query, key, dout = inputs((50, 30), 4, 512, 64, torch.bfloat16, "cuda")
    for tensor in (query, key):
        tensor.requires_grad_()
    out = attend(query, key, lengths=(50, 30), scale=0.04, columns=512, impl="triton")
    want = attend(query.float(), key.float(), lengths=(50, 30), scale=0.04, columns=512)
    for found, wanted in zip(
        (out, *torch.autograd.grad(out, (query, key), dout)),
        (want, *torch.autograd.grad(want, (query, key), dout.float())),
        strict=True,
    ):
        assert (found.float() - wanted.float()).norm() <= 6e-3 * wanted.float().norm()
