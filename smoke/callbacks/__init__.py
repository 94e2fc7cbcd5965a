"""Callbacks that measure a run of any ``lightning.Trainer``; they judge nothing and change nothing.

Each is a thin skin over a plain class; ``smoke.verdict.judge`` judges what they hold. Names are resolved when first
used, so that importing this package loads neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smoke.callbacks.attention_backend import AttentionBackend
    from smoke.callbacks.checkpoints import Checkpoints, RandomStates
    from smoke.callbacks.coverage import Coverage, GemmCounter
    from smoke.callbacks.dtype_ledger import DtypeLedger
    from smoke.callbacks.finite import Finite
    from smoke.callbacks.gradient_parity import GradientParity
    from smoke.callbacks.loss_sum import LossSum
    from smoke.callbacks.loss_tracker import LossTracker
    from smoke.callbacks.neutrality import Neutrality
    from smoke.callbacks.presence import GradientPresence
    from smoke.callbacks.saved_tensors import SavedTensors
    from smoke.callbacks.step_log import StepLog
    from smoke.callbacks.throughput import Throughput
    from smoke.callbacks.twin import twin_reference
    from smoke.callbacks.weight_freshness import WeightFreshness

__all__ = [
    "AttentionBackend",
    "Checkpoints",
    "Coverage",
    "DtypeLedger",
    "Finite",
    "GemmCounter",
    "GradientParity",
    "GradientPresence",
    "LossSum",
    "LossTracker",
    "RandomStates",
    "SavedTensors",
    "Neutrality",
    "StepLog",
    "Throughput",
    "WeightFreshness",
    "twin_reference",
]

_HOMES = {
    "AttentionBackend": "attention_backend",
    "Checkpoints": "checkpoints",
    "Coverage": "coverage",
    "DtypeLedger": "dtype_ledger",
    "Finite": "finite",
    "GemmCounter": "coverage",
    "GradientParity": "gradient_parity",
    "GradientPresence": "presence",
    "LossSum": "loss_sum",
    "LossTracker": "loss_tracker",
    "RandomStates": "checkpoints",
    "SavedTensors": "saved_tensors",
    "Neutrality": "neutrality",
    "StepLog": "step_log",
    "Throughput": "throughput",
    "WeightFreshness": "weight_freshness",
    "twin_reference": "twin",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
