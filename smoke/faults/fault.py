"""What a fault is, how it gets into the running program, and the small run that it is shown in.

A fault is a mistake that real projects have made, put into this program for the length of a ``with``: an attribute of a
class or module is replaced, nothing is edited, and afterwards everything is as before. It names the checks that must
turn red. ``smoke selftest`` injects each one into a run of a very small model; ``smoke replay`` injects the one that a
bundle names.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from smoke.config import CheckConfig, DataConfig, ModelConfig, RunConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake and what it must turn red."""

    name: str
    row: int
    """Row of the project's list of faults; 0 for one that was met since."""
    summary: str
    """One line: what is wrong."""
    red: tuple[str, ...]
    """Checks that must be red, all of them."""
    may_follow: tuple[str, ...] = ()
    """Checks that may be red too; every other one must stay green."""
    where: str
    """A word of the place, or of the detail, that the first of ``red`` gives."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What the small run needs of ``RunConfig``: precision, layout, recompute, policy ..."""
    inject: Callable[[], AbstractContextManager[None]]
    """The fault is in the program inside this context."""
    needs_cuda: bool = False
    """Whether only a CUDA device shows it; without one it is skipped."""
    needs_triton: bool = False
    """Whether it is in a Triton kernel; where triton is not installed it is skipped."""


_active: ContextVar[str] = ContextVar("fault", default="")


@contextlib.contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """The fault is in the program inside, and ``active()`` says its name."""
    token = _active.set(fault.name)
    try:
        with fault.inject():
            yield
    finally:
        _active.reset(token)


def active() -> str:
    """Name of the fault that is in the program now; empty without one."""
    return _active.get()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside; an attribute that the owner only inherits is inherited again afterwards."""
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


SMALL = ModelConfig(
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_attention_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    v_head_dim=32,
    n_routed_experts=4,
    num_nextn_predict_layers=1,
)
"""A dense layer, one with experts, and the prediction module."""


def small_config(**changes: Any) -> RunConfig:
    """A run of seconds: two layers, 256 tokens a step, four steps, gradients compared at every other one."""
    base = RunConfig(
        steps=4,
        recompute=("mla_up_proj",),
        model=SMALL,
        data=DataConfig(source="generated", sequence_length=64, micro_batch_size=4),
        check=CheckConfig(gradient_parity_every=2),
        trainer=TrainerConfig(progress_bar=False),
    )
    return dataclasses.replace(base, **changes)
