"""What every implementation of absorbed attention must satisfy, given its two functions."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from smoke.kernels.attention import reference
from smoke.numerics import relative_norm

LENGTHS = {
    "one token": (1,),
    "two tokens": (2,),
    "odd": (37,),
    "packed": (1, 5, 20, 1, 10),
    "ones": (1,) * 9,
}


def inputs(lengths, heads, latent, rotated, dtype, device, seed=0):
    """Query, latent and upstream gradient, each in the middle of a larger buffer full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    tokens, width = sum(lengths), latent + rotated
    shapes = ((tokens, heads, width), (tokens, width), (tokens, heads, latent))
    return [_guarded(torch.randn(shape, generator=generator), dtype, device) for shape in shapes]


def _guarded(values, dtype, device):
    rows = torch.full((values.shape[0] + 8, *values.shape[1:]), math.nan, dtype=dtype, device=device)
    rows[4:-4] = values.to(device, dtype)
    return rows[4:-4]


def check(module: ModuleType, lengths, heads, latent, rotated, dtype, device, limit):
    """Output, log-sum-exp and both gradients against the definition in float64; twice the same bits."""
    query, key, dout = inputs(lengths, heads, latent, rotated, dtype, device)
    scale = (latent + rotated) ** -0.5
    wide = [x.double().requires_grad_() for x in (query, key)]
    want, want_lse = reference.attend(*wide, lengths=lengths, scale=scale, columns=latent)
    want_gradients = torch.autograd.grad(want, wide, dout.double())
    runs = []
    for _ in range(2):
        out, lse = module.forward(query, key, tuple(lengths), scale, latent)
        runs.append([out, lse, *module.backward(query, key, out, lse, dout, tuple(lengths), scale)])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
    out, lse, dquery, dkey = runs[0]
    assert out.dtype is dquery.dtype is dkey.dtype is dtype
    assert (lse.double() - want_lse).abs().max() < 1e-3
    for name, found, wanted in (
        ("out", out, want),
        ("dquery", dquery, want_gradients[0]),
        ("dkey", dkey, want_gradients[1]),
    ):
        assert found.shape == wanted.shape
        error = (found.double() - wanted).norm() if wanted.norm() < 1e-9 else relative_norm(found, wanted)
        assert error <= limit, f"{name} of {heads} heads, lengths {lengths}: {error:.2e}"


def check_leak(module: ModuleType, heads, latent, rotated, dtype, device):
    """Changing one sequence changes no bit of the others."""
    lengths, scale = (33, 20, 50), 0.1
    query, key, dout = inputs(lengths, heads, latent, rotated, dtype, device)
    results = []
    for change in (0.0, 1.0):
        changed = [x.clone() for x in (query, key, dout)]
        for x in changed:
            x[33:53] += change
        out, lse = module.forward(changed[0], changed[1], lengths, scale, latent)
        results.append([out, lse, *module.backward(changed[0], changed[1], out, lse, changed[2], lengths, scale)])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[:33], after[:33])
        assert torch.equal(before[53:], after[53:])
        assert not torch.equal(before[33:53], after[33:53])
