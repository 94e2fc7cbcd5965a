"""What is measured before training starts: sizes, quantizers, parity trajectories, memory (``forms``: twin forms).

Everything here leaves the session as it found it: weights, buffers, random states and call counts are put back.
"""

from __future__ import annotations

import resource
import sys

import torch
from torch import Tensor

from smoke.kernels.quantize.api import operand
from smoke.kernels.quantize.known import known_answers, mismatches
from smoke.model.ledger import Ledger
from smoke.model.recompute import DISCARDING, SavedTensorError
from smoke.module import IGNORED_LABEL, Batch
from smoke.precision.plugin import leaves_of, live_specs, state_slices
from smoke.record import BitRow, MemoryRow, PreflightRow, QuantizerRow
from smoke.run.session import Session
from smoke.trajectories import Snapshot, Trajectory, compare, deterministic, follow


def parity(session: Session) -> tuple[list[BitRow], list[MemoryRow], float | None, tuple[str, ...]]:
    """Follow recompute on, on again, and off, from one snapshot.

    Returns bits, held bytes, MiB held with recompute on, and the losses with recompute on (exact hex).
    """
    steps = max(session.plan.config.check.parity_steps, session.plan.recipe.warmup_steps + 1)
    windows = [session.windows[i % session.plan.config.steps] for i in range(steps)]
    optimizer = session.optimizer()
    snapshot = Snapshot.take(session.module, optimizer)
    slices = {f"model.{name}": parts for name, parts in session.model.gradient_slices().items()}
    slices |= state_slices(session.model)

    def trajectory(*, recompute: bool) -> tuple[Trajectory, MemoryCount]:
        session.recompute.active = recompute
        count = MemoryCount(session)
        step = session.step(optimizer)
        result = follow(session.module, lambda w, g: count.after(step(w, g)), windows, (SavedTensorError,))
        snapshot.restore(session.module, optimizer)
        return result, count

    with deterministic():
        on, memory_on = trajectory(recompute=True)
        again, _ = trajectory(recompute=True)
        rows = compare("rerun", on, again, slices)
        memory: list[MemoryRow] = []
        if session.recompute.regions:
            off, memory_off = trajectory(recompute=False)
            rows += compare("recompute", on, off, slices)
            memory = memory_rows(session, memory_on, memory_off)
    session.recompute.active = True
    session.precision.runtime.calls.clear()
    held = None if memory_on.ledger is None else memory_on.ledger.held_with_recompute_bytes / 2**20
    return rows, memory, held, tuple(float(loss).hex() for loss in on.losses)


def preflight_rows(session: Session) -> list[PreflightRow]:
    """Sizes of the live leaves, batches and rope tables beside what recipe and kernels take."""
    recipe, rows = session.plan.recipe, []
    token_multiple, in_multiple, out_multiple = recipe.row_multiples
    for name, leaf in leaves_of(session.model).items():
        if session.precision.plan[name].quantized:
            for quantity, multiple in (("in_features", in_multiple), ("out_features", out_multiple)):
                value = getattr(leaf, quantity)
                rows.append(_row(name, quantity, value, "multiple", multiple))
    for index, batch in enumerate(session.batches):
        rows.append(_row(f"batch {index}", "tokens", batch["tokens"].numel(), "multiple", token_multiple))
        longest = int(batch["positions"].max()) + 1
        cos_PR, _ = session.model.rope_tables(batch["positions"].flatten())
        rows.append(_row(f"batch {index}", "rope table rows", cos_PR.shape[0], "at_least", longest))
        wrong = misplaced(batch)
        rows.append(_row(f"batch {index}", "tokens at a wrong position", wrong[0], "equal", 0))
        rows.append(_row(f"batch {index}", "labels that are not the next token", wrong[1], "equal", 0))
    width = session.plan.config.model.qk_rope_head_dim // 2
    rows.append(_row("rope table", "columns", cos_PR.shape[-1], "equal", width))
    return rows


def misplaced(batch: Batch) -> tuple[int, int]:
    """Tokens whose position does not count from their sequence's start; labels that are not its next token.

    Ignored labels are right anywhere, and needed at a packed sequence's end; a row's last label is beyond the row.
    """
    tokens, labels, positions = batch["tokens"], batch["labels"], batch["positions"]
    place = torch.arange(tokens.shape[-1], device=tokens.device)
    last = place == place[-1]
    if "cu_seqlens" in batch:
        edges = batch["cu_seqlens"].long()
        last[edges[1:] - 1] = True
        place = place - torch.repeat_interleave(edges[:-1], edges.diff())
        wrong_end = last & (labels != IGNORED_LABEL)
    else:
        wrong_end = torch.zeros_like(last)
    wrong = ~last & (labels != tokens.roll(-1, -1)) & (labels != IGNORED_LABEL) | wrong_end
    return int((positions != place).sum()), int(wrong.sum())


def _row(name: str, quantity: str, value: int, rule: str, required: int) -> PreflightRow:
    return PreflightRow(name=name, quantity=quantity, value=value, rule=rule, required=required)


def quantizer_rows(session: Session) -> list[QuantizerRow]:
    """Known answers of what the recipe says, put through the quantizers of the plug-in and of every live leaf."""
    wanted = session.plan.recipe.specs(session.plan.config.policy.gradient_format)
    live = dict.fromkeys(session.precision.specs.items(), "the recipe")
    live = {**live_specs(session.model), **live}
    rows = []
    for (role, spec), module in live.items():
        for known in known_answers(wanted[role]):
            wrong = mismatches(
                known, lambda x, direction, spec=spec, **how: operand(x, spec, direction, **how), session.plan.device
            )
            case = f"{role} of {module}: {known.name}"
            detail = "; ".join(wrong[:3])
            elements = known.size**2 * len(known.directions)
            rows.append(QuantizerRow(case=case, elements=elements, mismatches=len(wrong), detail=detail))
    return rows


def peak_gib(device: str) -> float:
    """Peak device memory (CUDA), or peak resident set of this process (CPU)."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1 if sys.platform == "darwin" else 1024) / 2**30


class MemoryCount:
    """The ledger of the first step of a trajectory."""

    def __init__(self, session: Session):
        self.session = session
        self.ledger: Ledger | None = None
        self.replays: dict[str, int] = {}

    def after(self, loss: Tensor) -> Tensor:
        if self.ledger is None:
            self.ledger, self.replays = self.session.recompute.ledger, dict(self.session.recompute.replays)
        return loss


def memory_rows(session: Session, on: MemoryCount, off: MemoryCount) -> list[MemoryRow]:
    """One row for each region; the held bytes are those of the whole model."""
    if on.ledger is None or off.ledger is None:
        return []
    rows = []
    for region in sorted(session.recompute.regions):
        inner, outputs = off.ledger.region_bytes(region)
        _, released = on.ledger.region_bytes(region)
        rows.append(
            MemoryRow(
                region=region,
                held_off_bytes=off.ledger.held_bytes,
                held_on_bytes=on.ledger.held_with_recompute_bytes,
                predicted_on_bytes=off.ledger.predicted_bytes,
                inner_bytes=inner,
                output_bytes=outputs,
                released_output_bytes=released,
                replays=on.replays.get(region, 0),
                calls=off.ledger.calls_of(region),
                discards_outputs=region in DISCARDING,
            )
        )
    return rows
