"""What Transformer Engine says it can run here. The only file of the project that imports transformer_engine.

This release asks and does not drive: the emulation makes the numbers (``--backend emulated``). The import takes
several seconds and needs a CUDA device, so callers look at the package's metadata first and ask only where an answer
can be yes.
"""

from __future__ import annotations

import importlib

from smoke.precision.recipe import RECIPES

QUESTIONS = {
    "fp8-delayed": "is_fp8_available",
    "fp8-tensorwise": "is_fp8_available",
    "fp8-blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}
"""Transformer Engine's own test for each recipe (since 2.9 each returns its reason)."""


def blockers() -> dict[str, str]:
    """For each recipe: why Transformer Engine cannot run it on the current device, empty where it can."""
    try:
        engine = importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return dict.fromkeys(QUESTIONS, f"transformer_engine.pytorch cannot be imported: {first_line}")
    return {name: _blocker(engine, QUESTIONS[name]) for name in RECIPES if name in QUESTIONS}


def _blocker(engine, question: str) -> str:
    ask = getattr(engine, question, None)
    if ask is None:
        return f"this version of Transformer Engine has no {question} (2.9 or later has)"
    available, reason = ask(return_reason=True)
    return "" if available else reason or f"{question} answers no"
