"""Absorbed core attention on a GPU: ours beside the one stock kernel that runs it, in one process.

    python -m smoke.bench.attention [TOKENS HEADS LATENT ROTATED] [--json FILE]

SDPA takes 576 and 512 columns only in its memory-efficient form (Flash, cuDNN and FlexAttention refuse them) and runs
here in its default, fastest mode; ours is deterministic. Medians of CUDA-event times after a warm-up, on random data,
every call on the next of two input sets; the results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from smoke.kernels.attention.api import implementation
from smoke.numerics import relative_norm

SETS = 2
SIZES = (4096, 128, 512, 64)


def milliseconds(runs: list[Callable[[], object]], repeats: int) -> float:
    """Median device time of one call, taking the runs in turn, after each has run once."""
    for run in runs:
        run()
    times = []
    for run in itertools.islice(itertools.cycle(runs), repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


class Stock:
    """SDPA with one key head expanded to all query heads; the value is a part of the key."""

    def __init__(self, query_TND: Tensor, latent_TD: Tensor, dout_TNL: Tensor, scale: float):
        self.query = query_TND.transpose(0, 1)[None].detach().requires_grad_()
        self.latent = latent_TD[None, None].detach().requires_grad_()
        self.dout, self.scale = dout_TNL.transpose(0, 1)[None], scale
        self.out = self.forward()

    def forward(self) -> Tensor:
        key = self.latent.expand(-1, self.query.shape[1], -1, -1)
        value = key[..., : self.dout.shape[-1]]
        return scaled_dot_product_attention(self.query, key, value, is_causal=True, scale=self.scale)

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, (self.query, self.latent), self.dout, retain_graph=True)


class Ours:
    """The implementation that ``impl="triton"`` takes here."""

    def __init__(self, query_TND: Tensor, latent_TD: Tensor, dout_TNL: Tensor, scale: float):
        self.module = implementation(query_TND.device, dout_TNL.shape[-1])
        self.inputs, self.dout, self.scale = (query_TND, latent_TD), dout_TNL, scale
        self.lengths = (query_TND.shape[0],)
        self.out = self.forward()

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.module.forward(*self.inputs, self.lengths, self.scale, self.dout.shape[-1])

    def backward(self) -> tuple[Tensor, Tensor]:
        return self.module.backward(*self.inputs, *self.out, self.dout, self.lengths, self.scale)


def measure(tokens: int, heads: int, latent: int, rotated: int, repeats: int) -> dict[str, float | str]:
    """Times in ms, TFLOP/s of the causal half, ratios, and the relative distance of the two results."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((tokens, heads, latent + rotated), (tokens, latent + rotated), (tokens, heads, latent))
    sets = [[torch.randn(s, device="cuda", generator=generator).bfloat16() for s in shapes] for _ in range(SETS)]
    scale = (latent + rotated) ** -0.5
    stock = [Stock(query, key, dout, scale) for query, key, dout in sets]
    ours = [Ours(query, key, dout, scale) for query, key, dout in sets]
    products = tokens * tokens * heads * 1e-9  # two operations a product, half of the pairs; to TFLOP/s from ms
    result: dict[str, float | str] = {
        "device": torch.cuda.get_device_name(),
        "kernels": ours[0].module.__name__.rpartition(".")[2],
        "out_distance": relative_norm(ours[0].out[0], stock[0].out[0].transpose(0, 1)),
        "dlatent_distance": relative_norm(ours[0].backward()[1], stock[0].backward()[1][0, 0]),
    }
    for name, sides, columns in (
        ("forward", ([s.forward for s in stock], [o.forward for o in ours]), 2 * latent + rotated),
        ("backward", ([s.backward for s in stock], [o.backward for o in ours]), 5 * latent + 3 * rotated),
    ):
        times = [milliseconds(list(runs), repeats) for runs in sides]
        result |= {f"{name}_sdpa_ms": times[0], f"{name}_ours_ms": times[1], f"{name}_ratio": times[0] / times[1]}
        result[f"{name}_ours_tflops"] = products * columns / times[1]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "sizes", nargs="*", type=int, default=[4096, 128, 512, 64], help="tokens, heads, latent, rotated"
    )
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(4, "smoke.bench.attention: no CUDA device here\n")
    tokens, heads, latent, rotated = options.sizes
    result = measure(tokens, heads, latent, rotated, options.repeats)
    for name, value in result.items():
        print(f"{name:24}{value if isinstance(value, str) else format(value, '.4g')}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
