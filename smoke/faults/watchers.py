"""Faults of the watchers: a callback, a twin or a replay changes the run that it looks at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from smoke.faults.fault import Fault, replaced
from smoke.faults.numbers import last_step


def _in_gradient_presence(act: Callable[[Any, Any], None]) -> Callable[[], AbstractContextManager[None]]:
    """``act(trainer, module)`` before every optimizer step, at the end of what GradientPresence does there."""

    @contextlib.contextmanager
    def inject() -> Iterator[None]:
        from smoke.callbacks import GradientPresence

        original = GradientPresence.on_before_optimizer_step

        def meddling(callback: Any, trainer: Any, module: Any, optimizer: Any) -> None:
            original(callback, trainer, module, optimizer)
            act(trainer, module)

        with replaced(GradientPresence, "on_before_optimizer_step", meddling):
            yield

    return inject


def _draw(trainer: Any, module: Any) -> None:
    import torch

    torch.rand(1)


def _leave_in_eval_mode(trainer: Any, module: Any) -> None:
    if last_step(trainer):
        module.eval()


def _scale_a_gradient(trainer: Any, module: Any) -> None:
    module.model.layers[0].self_attention.linear_proj.weight.grad.mul_(1.01)


def _record_an_amax(trainer: Any, module: Any) -> None:
    import torch

    module.quantizer_forward.record(0, torch.tensor(1e4, device=module.device))


@contextlib.contextmanager
def written_through_data() -> Iterator[None]:
    from smoke.callbacks import GradientParity

    original = GradientParity.on_train_batch_start

    def meddling(callback: Any, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        original(callback, trainer, module, batch, batch_idx)
        if trainer.global_step == 1:
            module.model.embedding.weight.data.mul_(1.01)

    with replaced(GradientParity, "on_train_batch_start", meddling):
        yield


@contextlib.contextmanager
def load_counted_by_the_twin() -> Iterator[None]:
    """The twin borrows the live weights, which are no Parameters of its own, and adds to the counter of their owner."""
    import torch

    from smoke.model.routing import Router

    original = Router.forward
    live: dict[str, Any] = {}

    def counting(router: Any, x_TH: Any, sequences: Any) -> Any:
        routing = original(router, x_TH, sequences)
        if isinstance(router.weight, torch.nn.Parameter):
            live[router.label] = router
        elif routing.tokens_E.dtype is torch.float32:
            live[router.label].expert_load += routing.tokens_E
        return routing

    with replaced(Router, "forward", counting):
        yield


@contextlib.contextmanager
def load_counted_by_the_replay() -> Iterator[None]:
    from smoke.model import moe

    forward = moe.MoELayer.forward

    def counting(layer: Any, x_TH: Any, sequences: Any) -> Any:
        swiglu = moe.swiglu

        def count_and_multiply(*args: Any) -> Any:
            layer.router.expert_load[0] += 1
            return swiglu(*args)

        with replaced(moe, "swiglu", count_and_multiply):
            return forward(layer, x_TH, sequences)

    with replaced(moe.MoELayer, "forward", counting):
        yield


FAULTS = (
    Fault(
        name="callback-draws",
        row=21,
        summary="a callback draws from the random state that training uses",
        red=("neutrality",),
        where="on_before_optimizer_step: random state of torch",
        changes={"precision": "mxfp8"},
        inject=_in_gradient_presence(_draw),
    ),
    Fault(
        name="callback-leaves-eval-mode",
        row=21,
        summary="a callback leaves the module in eval mode",
        red=("neutrality",),
        where="train/eval flag",
        changes={"precision": "mxfp8"},
        inject=_in_gradient_presence(_leave_in_eval_mode),
    ),
    Fault(
        name="callback-scales-a-gradient",
        row=21,
        summary="a callback writes into a gradient before the optimizer takes it",
        red=("neutrality",),
        where="gradient of model.layers.0.self_attention.linear_proj.weight",
        changes={"precision": "mxfp8"},
        inject=_in_gradient_presence(_scale_a_gradient),
    ),
    Fault(
        name="callback-records-an-amax",
        row=21,
        summary="a callback enters an amax into the history of delayed scaling",
        red=("neutrality",),
        where="quantizer_forward.amax_history",
        changes={"precision": "fp8-delayed"},
        inject=_in_gradient_presence(_record_an_amax),
    ),
    Fault(
        name="callback-writes-through-data",
        row=21,
        summary="a callback writes into a weight, past autograd's version counter",
        red=("neutrality",),
        where="step 1 loss",
        changes={"precision": "mxfp8"},
        inject=written_through_data,
    ),
    Fault(
        name="load-counted-by-the-twin",
        row=30,
        summary="the twin's forward counts its tokens in the live router's load",
        red=("neutrality",),
        where="expert_load",
        changes={"precision": "mxfp8"},
        inject=load_counted_by_the_twin,
    ),
    Fault(
        name="load-counted-by-the-replay",
        row=30,
        summary="the replay of a region counts tokens in the router's load again",
        red=("recompute_parity",),
        where="expert_load",
        changes={"precision": "mxfp8", "recompute": ("moe_act",)},
        inject=load_counted_by_the_replay,
    ),
)
