"""What is measured before training starts: quantizers, twin forms, parity trajectories, memory.

Everything here leaves the session as it found it: weights, buffers, random states and call counts are put back.
"""

from __future__ import annotations

import math
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
from smoke.model.recompute import DISCARDING, SavedTensorError
from smoke.model.routing import record_routing, replay_routing
from smoke.module import IGNORED_LABEL, Batch
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


def absorbed_twins(session: Session) -> list[TwinRow]:
    """Absorbed and plain attention of the same weights, in float64: logits, MTP logits and every gradient."""
    batch = _varied(session, _few_tokens(session.batches[0]))
    absorbed, plain = (_float64(session, batch, form) for form in ("absorbed", "plain"))
    return [_twin_row("absorbed", name, absorbed, plain) for name in sorted(absorbed.keys() | plain.keys())]


def packed_twins(session: Session) -> list[TwinRow]:
    """A packed batch against its sequences alone, in float64, and what a changed sequence leaks into the others.

    Logits are compared for each sequence, gradients as the sum over the sequences. The leak is the difference, exactly
    zero when there is none, of all other sequences' logits after every token of one sequence was changed. The expert
    choices stay as they were, so that each expert multiplies as many rows as before and rounds as before.
    """
    batch, form = _varied(session, session.batches[0]), session.plan.config.model.attention_form
    edges = batch["cu_seqlens"].tolist()
    spans = list(zip(edges, edges[1:], strict=False))
    with record_routing() as routing:
        packed = _float64(session, batch, form)
    rows = []
    total = {name: torch.zeros_like(value) for name, value in packed.items() if name not in LOGITS}
    for index, (start, stop) in enumerate(spans):
        alone = {key: batch[key][start:stop] for key in ("tokens", "labels")}
        alone["positions"] = torch.arange(stop - start, device=batch["positions"].device)
        alone["cu_seqlens"] = batch["cu_seqlens"].new_tensor([0, stop - start])
        found = _float64(session, alone, form)
        for name in LOGITS & packed.keys():
            part = {name: packed[name][start:stop]}
            rows.append(replace(_twin_row("packed", name, part, found), tensor=f"sequence {index} {name}"))
        for name in total.keys() & found.keys():
            total[name] += found[name]
    rows += [_twin_row("packed", name, packed, total) for name in total]
    for index in sorted({0, len(spans) // 2}):
        with replay_routing(routing):
            rows += _leaks(session, batch, form, packed, index, spans[index])
    return rows


def _leaks(
    session: Session, batch: Batch, form: str, before: dict[str, Tensor], index: int, span: tuple[int, int]
) -> list[TwinRow]:
    """Change every token of one sequence; compare all others bit by bit."""
    start, stop = span
    tokens_T = batch["tokens"].clone()
    tokens_T[start:stop] = (tokens_T[start:stop] + 1) % session.plan.config.model.vocab_size
    after, rows = _float64(session, {**batch, "tokens": tokens_T}, form, gradients=False), []
    for name in LOGITS & before.keys():
        change = (after[name] - before[name]).abs()
        change[start:stop] = 0.0
        tensor = f"{name} of the other sequences, sequence {index} changed"
        rows.append(TwinRow(kind="packed_leak", tensor=tensor, relative_error=float(change.max())))
    return rows


LOGITS = {"logits", "mtp logits"}


def _twin_row(kind: str, name: str, left: dict[str, Tensor], right: dict[str, Tensor]) -> TwinRow:
    """Relative error of one tensor; infinite where only one side has it."""
    both = name in left and name in right
    return TwinRow(kind=kind, tensor=name, relative_error=relative_norm(left[name], right[name]) if both else math.inf)


def _few_tokens(batch: Batch) -> Batch:
    """The first row of an sbhd batch; a packed batch whole."""
    if "cu_seqlens" in batch:
        return batch
    return {key: value[:1] for key, value in batch.items()}


def _varied(session: Session, batch: Batch) -> Batch:
    """The same sequences with tokens drawn over the whole vocabulary.

    In a stretch of equal tokens all values are equal: queries and keys get a gradient of zero, and rounding would be
    compared with rounding.
    """
    generator, tokens = torch.Generator().manual_seed(0), batch["tokens"]
    drawn = torch.randint(session.plan.config.model.vocab_size, tokens.shape, generator=generator).to(tokens.device)
    return {**batch, "tokens": drawn, "labels": torch.where(batch["labels"] < 0, batch["labels"], drawn.roll(-1, -1))}


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


def _float64(session: Session, batch: Batch, form: str, *, gradients: bool = True) -> dict[str, Tensor]:
    """Logits of the live weights in float64, and the gradients of a sum over the tokens of all of them."""
    model, state = _float64_model(session, form)
    parameters = {name: state[name].requires_grad_(gradients) for name, _ in model.named_parameters()}
    with torch.set_grad_enabled(gradients):
        out = functional_call(model, state, (batch,))
        logits = {"logits": out.logits_TV, "mtp logits": out.mtp_logits_TV}
        found = {name: value for name, value in logits.items() if value is not None}
        if not gradients:
            return found
        weights = torch.linspace(-1, 1, out.logits_TV.shape[-1], dtype=torch.float64, device=out.logits_TV.device)
        scalar = torch.stack([(torch.log_softmax(value, -1) * weights).sum() for value in found.values()]).sum()
        grads = torch.autograd.grad(scalar, list(parameters.values()), allow_unused=True)
    named = {f"gradient of {n}": g for n, g in zip(parameters, grads, strict=True) if g is not None}
    return {name: value.detach() for name, value in found.items()} | named
