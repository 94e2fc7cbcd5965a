"""Faults of what a run keeps and in which type: quantized weights that an update made stale, slipped types."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from smoke.faults.fault import Fault, replaced


@contextlib.contextmanager
def weight_cache_never_refreshed() -> Iterator[None]:
    from smoke.precision import emulated

    fresh = emulated._weights
    cache: dict[Any, Any] = {}

    def cached(w_OI: Sequence[Any], spec: Any, direction: Any, scales: Any) -> Any:
        key = (tuple(w.data_ptr() for w in w_OI), direction)
        if key not in cache:
            cache[key] = fresh(w_OI, spec, direction, scales)
        return cache[key]

    with replaced(emulated, "_weights", cached):
        yield


@contextlib.contextmanager
def masters_in_bf16() -> Iterator[None]:
    import torch

    from smoke.module import MasterAdamW

    original = MasterAdamW.__init__

    def without_masters(optimizer: Any, groups: Any, **options: Any) -> None:
        original(optimizer, groups, **options)
        narrow = [{**g, "params": [p.detach().clone() for p in g["params"]]} for g in optimizer.param_groups]
        optimizer.inner = torch.optim.AdamW(narrow, fused=True)

    @torch.no_grad()
    def step(optimizer: Any, closure: Any = None) -> Any:
        with torch.enable_grad():
            result = None if closure is None else closure()
        for parameter, master in optimizer.pairs():
            master.grad = None if parameter.grad is None else parameter.grad.clone()
        optimizer.inner.step()
        for parameter, master in optimizer.pairs():
            parameter.copy_(master)
            master.grad = None
        return result

    with replaced(MasterAdamW, "__init__", without_masters), replaced(MasterAdamW, "step", step):
        yield


@contextlib.contextmanager
def router_in_bf16() -> Iterator[None]:
    import torch

    from smoke.model.routing import Router

    original = Router.__init__

    def narrow(router: Any, *args: Any, **options: Any) -> None:
        original(router, *args, **options)
        if router.weight.dtype is torch.float32:
            router.weight = torch.nn.Parameter(router.weight.detach().bfloat16())

    with replaced(Router, "__init__", narrow):
        yield


@contextlib.contextmanager
def query_latent_in_float32() -> Iterator[None]:
    import torch

    from smoke.model.mla import MLASelfAttention

    original = MLASelfAttention._query

    def widened(attention: Any, query_in_TQ: Any) -> Any:
        quantizers = getattr(attention.linear_q_up_proj, "quantizers", None)
        if quantizers is None or not quantizers.runtime.modes or query_in_TQ.dtype is not torch.bfloat16:
            return original(attention, query_in_TQ)
        return original(attention, query_in_TQ.float()).to(query_in_TQ.dtype)

    with replaced(MLASelfAttention, "_query", widened):
        yield


FAULTS = (
    Fault(
        name="weight-cache-never-refreshed",
        row=1,
        summary="quantized weights are cached and not made anew after an optimizer step",
        red=("weight_freshness",),
        may_follow=("gradient_parity", "loss_tracking", "resume_parity"),
        where="step 1 ",
        changes={"precision": "mxfp8"},
        inject=weight_cache_never_refreshed,
    ),
    Fault(
        name="masters-in-bf16",
        row=32,
        summary="the optimizer's masters are BF16, so small updates are lost",
        red=("dtype_ledger",),
        where="master",
        changes={"precision": "mxfp8"},
        inject=masters_in_bf16,
    ),
    Fault(
        name="router-in-bf16",
        row=32,
        summary="the router's weight, and so its scores, are BF16",
        red=("dtype_ledger",),
        where="router",
        changes={"precision": "mxfp8"},
        inject=router_in_bf16,
    ),
    Fault(
        name="query-latent-in-float32",
        row=32,
        summary="the query path falls back to float32 behind its latent norm",
        red=("dtype_ledger",),
        may_follow=("gradient_parity",),
        where="linear_q_up_proj",
        changes={"precision": "mxfp8"},
        inject=query_latent_in_float32,
    ),
)
