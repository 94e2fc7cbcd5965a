"""Absorbed attention without a GPU: the definition, the schedule, what is refused, the portable kernels interpreted."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from attention_cases import LENGTHS, inputs

from smoke.kernels.attention.api import attend, blocker
from smoke.kernels.attention.schedule import schedule

HERE = pathlib.Path(__file__).resolve().parent
CHECKS = 16


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_definition_is_stock_attention_of_each_sequence(lengths):
    query, latent, dout = inputs(lengths, 3, 8, 4, torch.float64, "cpu")
    query.requires_grad_()
    latent.requires_grad_()
    ours = attend(query, latent, lengths=lengths, scale=0.3, columns=8)
    parts = []
    for q, k in zip(query.split(list(lengths)), latent.split(list(lengths)), strict=True):
        heads = k.unsqueeze(0).expand(3, -1, -1)
        stock = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), heads, heads, is_causal=True, scale=0.3
        )
        parts.append(stock.transpose(0, 1)[..., :8])
    theirs = torch.cat(parts)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(x, (query, latent), dout) for x in (ours, theirs)), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lengths", [(1,), (300,), (1, 5, 200, 64, 1), (64, 64)])
@pytest.mark.parametrize("heads", [1, 3, 128])
def test_shares_cover_every_visible_pair_once(lengths, heads):
    block, tokens = 64, sum(lengths)
    starts, shares, first = schedule(lengths, heads, block, torch.device("cpu"))
    assert sorted(shares[:, 3].tolist()) == list(range(len(shares)))
    seen = torch.zeros(-(-tokens // block), tokens * heads, dtype=torch.int64)
    for number, start, stop, slot in shares.tolist():
        assert first[number] <= slot < first[number + 1]
        assert start < stop
        seen[number, start:stop] += 1
    assert seen.max() == 1
    token = torch.arange(tokens * heads) // heads
    for number in range(len(seen)):
        keys = torch.arange(number * block, min((number + 1) * block, tokens))
        visible = (keys[None, :] <= token[:, None]) & (keys[None, :] >= starts[token][:, None])
        assert bool((seen[number].bool() >= visible.any(1)).all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": (3, 0, 4)}, "positive"),
        ({"lengths": (3, 5)}, "sum to 7"),
        ({"lengths": ()}, "positive"),
        ({"columns": 0}, "columns 0"),
        ({"columns": 99}, "columns 99"),
        ({"impl": "triton"}, "CUDA device|triton is not installed"),
        ({"impl": "tritn"}, "tritn"),
    ],
)
def test_what_is_refused(change, words):
    query, latent, _ = inputs((7,), 2, 16, 16, torch.float32, "cpu")
    with pytest.raises(ValueError, match=words):
        attend(query, latent, **{"lengths": (7,), "scale": 1.0, "columns": 16, **change})


@pytest.mark.parametrize(
    ("dtype", "latent", "rotated", "words"),
    [
        (torch.float32, 512, 64, "BF16 and FP16"),
        (torch.bfloat16, 500, 64, "nearest legal is 512"),
        (torch.bfloat16, 512, 7, "nearest legal is 16"),
        (torch.bfloat16, 1024, 64, "nearest legal is 512"),
    ],
)
def test_widths_that_the_kernels_do_not_take(dtype, latent, rotated, words):
    pytest.importorskip("triton")
    assert words in blocker(torch.device("cuda"), dtype, latent, rotated)


def test_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    without_workers = ["-o", "addopts=--strict-markers", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *without_workers, str(HERE / "interpreted_attention.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]
    assert f"{CHECKS} passed" in result.stdout
