"""The checks of this release, which of them a run must pass, and the memory that a run with them needs.

A check that cannot apply is not required, and its reason is printed with SKIP. A required check that the user skips
stays required: the run then ends in exit code 4.
"""

from __future__ import annotations

from smoke import shapes
from smoke.config import RunConfig
from smoke.precision.recipe import Recipe

CHECKS = (
    "preflight",
    "coverage",
    "quantizer",
    "recompute_parity",
    "gradient_parity",
    "quantization_engaged",
    "absorbed_parity",
    "packed_parity",
    "rope_contract",
    "saved_tensors",
    "finite",
    "weight_freshness",
    "gradient_presence",
    "dtype_ledger",
    "loss_tracking",
    "memory",
    "throughput",
    "determinism",
    "neutrality",
    "attention_backend",
    "accumulation_parity",
    "resume_parity",
    "baseline",
)
"""In the order of the report."""

LOSS_TRACKING_STEPS = 10
"""loss_tracking compares the first five losses with the last five."""
THROUGHPUT_STEPS = 4
"""Two steps warm up, and one measured step would have no spread."""

RESUME_STEPS = 3
"""One step before the first resume, and one behind each of the two."""


def required_checks(config: RunConfig, recipe: Recipe) -> tuple[tuple[str, ...], dict[str, str]]:
    """The checks that must pass, and the reason of each that will not run."""
    reasons: dict[str, str] = {}
    if recipe.name == "bf16":
        reasons["quantizer"] = reasons["quantization_engaged"] = "bf16 quantizes nothing"
        reasons["weight_freshness"] = "bf16 quantizes nothing"
    elif config.steps < 2:
        reasons["weight_freshness"] = "needs --steps 2 or more: a cache is stale only after an update"
    if not config.recompute:
        reasons["recompute_parity"] = reasons["memory"] = "--recompute none: nothing is recomputed"
    if config.layout != "thd":
        reasons["packed_parity"] = "--layout sbhd: nothing is packed"
    if config.steps <= recipe.warmup_steps:
        needed = f"needs --steps {recipe.warmup_steps + 1} or more, this run has {config.steps}"
        reason = f"the scales of {recipe.name} are set from data in the first {recipe.warmup_steps} steps: {needed}"
        reasons |= dict.fromkeys(("gradient_parity", "quantization_engaged", "gradient_presence"), reason)
    if config.steps < LOSS_TRACKING_STEPS:
        reasons["loss_tracking"] = f"needs --steps {LOSS_TRACKING_STEPS} or more, this run has {config.steps}"
    if config.steps < THROUGHPUT_STEPS:
        reasons["throughput"] = f"needs --steps {THROUGHPUT_STEPS} or more (two warm up), this run has {config.steps}"
    if config.steps < RESUME_STEPS:
        reasons["resume_parity"] = f"needs --steps {RESUME_STEPS} or more, this run has {config.steps}"
    if config.baseline is None:
        reasons["baseline"] = "no --baseline FILE to hold the run against"
    required = tuple(name for name in CHECKS if name not in reasons)
    reasons |= {name: "--check.skip" for name in config.check.skip if name in required}
    return required, reasons


def least_memory(config: RunConfig, recipe: Recipe) -> int:
    """Bytes that the request needs at the very least, with the checks that compare trajectories."""
    _, skipped = required_checks(config, recipe)
    compares = not {"recompute_parity", "determinism", "memory"} <= set(skipped)
    steps = max(config.check.parity_steps, recipe.warmup_steps + 1) if compares else 0
    batches = config.steps * config.trainer.accumulate_grad_batches
    return shapes.least_bytes(config.model, config.data, batches, steps)
