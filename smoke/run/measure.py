"""What is measured before training starts: quantizers, twin forms, parity trajectories, memory.

Everything here leaves the session as it found it: weights, buffers, random states and call counts are put back.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call

from smoke.kernels.quantize.api import operand
from smoke.kernels.quantize.known import known_answers, mismatches
from smoke.model.deepseek import DeepseekV3
from smoke.model.ledger import Ledger
from smoke.model.recompute import SavedTensorError
from smoke.module import Batch
from smoke.numerics import relative_norm
from smoke.precision.plugin import leaves_of, live_specs
from smoke.record import BitRow, MemoryRow, PreflightRow, QuantizerRow, TwinRow
from smoke.run.session import Session
from smoke.trajectories import Snapshot, Trajectory, compare, deterministic, follow


def parity(session: Session) -> tuple[list[BitRow], list[MemoryRow], float | None]:
    """Follow recompute on, on again, and off, from one snapshot: bits, held bytes, and MiB held with recompute on."""
    steps = max(session.plan.config.check.parity_steps, session.plan.recipe.warmup_steps + 1)
    batches = [session.batches[i % len(session.batches)] for i in range(steps)]
    optimizer = session.optimizer()
    snapshot = Snapshot.take(session.module, optimizer)
    slices = {f"model.{name}": parts for name, parts in session.model.gradient_slices().items()}

    def trajectory(*, recompute: bool) -> tuple[Trajectory, MemoryCount]:
        session.recompute.active = recompute
        count = MemoryCount(session)
        step = session.step(optimizer)
        result = follow(session.module, lambda b, g: count.after(step(b, g)), batches, (SavedTensorError,))
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
    return rows, memory, held


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
        rows.append(_row(f"batch {index}", "positions", _positions(session), "at_least", longest))
    cos_PR, _ = session.model.rope_tables(session.batches[0]["positions"].flatten())
    width = session.plan.config.model.qk_rope_head_dim // 2
    rows.append(_row("rope table", "columns", cos_PR.shape[-1], "equal", width))
    return rows


def _positions(session: Session) -> int:
    return session.plan.config.model.max_position_embeddings


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
            wrong = mismatches(known, lambda x, direction, spec=spec, **how: operand(x, spec, direction, **how))
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
                discards_outputs=region in DISCARDING,
            )
        )
    return rows


DISCARDING = ("mla_up_proj", "layernorm", "moe_act")


def absorbed_twins(session: Session) -> list[TwinRow]:
    """Absorbed and plain attention of the same weights, in float64: logits, loss and every gradient."""
    batch = _few_tokens(session.batches[0])
    forms = [_float64_outputs(session, batch, form) for form in ("absorbed", "plain")]
    names = forms[0].keys() & forms[1].keys()
    return [
        TwinRow(kind="absorbed", tensor=name, relative_error=relative_norm(forms[0][name], forms[1][name]))
        for name in sorted(names)
    ]


def packed_twins(session: Session) -> list[TwinRow]:
    """Each sequence of a packed batch against the same sequence alone, in float64: its logits."""
    batch = session.batches[0]
    edges = batch["cu_seqlens"].tolist()
    packed = _float64_logits(session, batch)
    rows = []
    for index, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        alone = {key: batch[key][start:stop] for key in ("tokens", "labels", "positions")}
        alone["cu_seqlens"] = batch["cu_seqlens"].new_tensor([0, stop - start])
        for name, logits in _float64_logits(session, alone).items():
            error = relative_norm(packed[name][start:stop], logits)
            rows.append(TwinRow(kind="packed", tensor=f"sequence {index} {name}", relative_error=error))
    return rows


def _few_tokens(batch: Batch) -> Batch:
    """The first row of an sbhd batch; a packed batch whole."""
    if "cu_seqlens" in batch:
        return batch
    return {key: value[:1] for key, value in batch.items()}


def _float64_model(session: Session, form: str) -> tuple[DeepseekV3, dict[str, Tensor]]:
    config = session.plan.config
    model = DeepseekV3(
        replace(config.model, attention_form=form),
        layout=config.layout,
        impl="reference",
        dtype=torch.float64,
        device="meta",
    )
    live = {**dict(session.model.named_parameters()), **dict(session.model.named_buffers())}
    names = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return model, {n: live[n].detach().to(torch.float64, copy=True) for n in names}


def _float64_logits(session: Session, batch: Batch) -> dict[str, Tensor]:
    model, state = _float64_model(session, session.plan.config.model.attention_form)
    with torch.no_grad():
        out = functional_call(model, state, (batch,))
    logits = {"logits": out.logits_TV}
    if out.mtp_logits_TV is not None:
        logits["mtp logits"] = out.mtp_logits_TV
    return logits


def _float64_outputs(session: Session, batch: Batch, form: str) -> dict[str, Tensor]:
    model, state = _float64_model(session, form)
    parameters = {name: state[name].requires_grad_() for name, _ in model.named_parameters()}
    with torch.enable_grad():
        out = functional_call(model, state, (batch,))
        weights = torch.linspace(-1, 1, out.logits_TV.shape[-1], dtype=torch.float64, device=out.logits_TV.device)
        scalar = (torch.log_softmax(out.logits_TV, -1) * weights).sum()
        gradients = torch.autograd.grad(scalar, list(parameters.values()), allow_unused=True)
    found = {f"gradient of {n}": g for n, g in zip(parameters, gradients, strict=True) if g is not None}
    return {"logits": out.logits_TV.detach(), **found}
