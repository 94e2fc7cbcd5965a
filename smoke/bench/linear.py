"""An emulated linear on this device, forward and backward, beside BF16 and torchao's emulated MXFP8 linear.

    python -m smoke.bench.linear [TOKENS IN OUT] [--threads N]

Medians of the wall clock on random data, after warm-up. The BF16 linear is this project's own leaf, which is the stock
BF16 product where the CPU has BF16 instructions and a float32 product of the same operands where it has none; there the
stock one is a scalar loop (torch's ``F.linear`` is timed too when ``--stock`` is given).
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from statistics import median
from typing import cast

import torch
from torch import Tensor

from smoke.config import PolicyConfig
from smoke.environment import cpu_flags
from smoke.kernels.support import stock_bf16
from smoke.model.linear import Linear
from smoke.precision.emulated import Runtime
from smoke.precision.plugin import EmulatedPrecision
from smoke.precision.recipe import RECIPES


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Median wall time of one call, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


def leaf_step(leaf: Linear, x_TI: Tensor, dy_TO: Tensor, runtime: Runtime | None = None) -> Callable[[], None]:
    """Forward and backward of a leaf; gradients are dropped again."""

    def step() -> None:
        x = x_TI.detach().requires_grad_()
        if runtime is None:
            y = leaf(x)
        else:
            with runtime.autocast():
                y = leaf(x)
        y.backward(dy_TO)
        leaf.weight.grad = None

    return step


def quantized(leaf: Linear, name: str) -> tuple[Linear, Runtime]:
    """The emulated leaf of a recipe over the same Parameter, and the runtime whose autocast it runs in."""
    plugin = EmulatedPrecision(RECIPES[name], PolicyConfig(), num_layers=1)
    holder = torch.nn.ModuleDict({"linear": leaf})
    plugin.convert_module(holder)
    return cast("Linear", holder["linear"]), plugin.runtime


def torchao_step(leaf: Linear, x_TI: Tensor, dy_TO: Tensor) -> Callable[[], None] | None:
    """torchao's MXFP8 training linear in emulation; None where torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        return None
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    def step() -> None:
        x = x_TI.detach().requires_grad_()
        y = _to_mxfp8_then_scaled_mm(x, leaf.weight, KernelPreference.EMULATED, ScaleCalculationMode.RCEIL)
        y.backward(dy_TO)
        leaf.weight.grad = None

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sizes", nargs="*", type=int, default=[4096, 1024, 1024], help="tokens, inputs, outputs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--stock", action="store_true", help="also time torch's own BF16 linear and torchao")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokens, inputs, outputs = options.sizes
    torch.manual_seed(0)
    leaf = Linear(inputs, outputs)
    torch.nn.init.normal_(leaf.weight, std=0.02)
    x_TI, dy_TO = torch.randn(tokens, inputs).bfloat16(), torch.randn(tokens, outputs).bfloat16()
    native = "stock BF16" if stock_bf16(x_TI.device) else "float32 product of BF16 operands"
    wanted = sorted(set(cpu_flags()) & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
    print(f"{tokens} x {inputs} x {outputs}, {options.threads} threads, CPU with {' '.join(wanted)}; BF16 is {native}")
    base = milliseconds(leaf_step(leaf, x_TI, dy_TO), options.repeats)
    print(f"{'bf16':16}{base:10.1f} ms")
    times = {}
    for name in ("fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4"):
        emulated, runtime = quantized(leaf, name)
        times[name] = milliseconds(leaf_step(emulated, x_TI, dy_TO, runtime), options.repeats)
        print(f"{name:16}{times[name]:10.1f} ms {times[name] / base:6.2f} x bf16")
    peer = torchao_step(leaf, x_TI, dy_TO)
    if peer is not None and (options.stock or stock_bf16(x_TI.device)):
        theirs = milliseconds(peer, max(1, options.repeats // 3))
        print(
            f"{'torchao mxfp8':16}{theirs:10.1f} ms {theirs / base:6.2f} x bf16, {theirs / times['mxfp8']:.2f} x ours"
        )
    if options.stock:

        def stock_step() -> None:
            x = x_TI.detach().requires_grad_()
            torch.nn.functional.linear(x, leaf.weight).backward(dy_TO)
            leaf.weight.grad = None

        print(f"{'F.linear bf16':16}{milliseconds(stock_step, 1):10.1f} ms")


if __name__ == "__main__":
    main()
