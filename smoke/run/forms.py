"""Twin forms in float64: absorbed against plain attention, packed sequences against the same sequences alone.

Both are equal in exact arithmetic, so in float64 they differ by rounding alone, and a difference that is larger is a
fault of one of the two forms. The live weights are widened; the session stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from smoke.model.deepseek import DeepseekV3
from smoke.model.routing import record_routing, replay_routing
from smoke.module import Batch
from smoke.numerics import relative_norm
from smoke.record import TwinRow
from smoke.run.session import Session


def absorbed_twins(session: Session) -> list[TwinRow]:
    """Absorbed and plain attention of the same weights, in float64: logits, MTP logits and every gradient."""
    batch = varied(session, few_tokens(session.batches[0]))
    absorbed, plain = (float64(session, batch, form) for form in ("absorbed", "plain"))
    return [_twin_row("absorbed", name, absorbed, plain) for name in sorted(absorbed.keys() | plain.keys())]


def packed_twins(session: Session) -> list[TwinRow]:
    """A packed batch against its sequences alone, in float64, and what a changed sequence leaks into the others.

    Logits are compared for each sequence, gradients as the sum over the sequences. The leak is the difference, exactly
    zero when there is none, of all other sequences' logits after every token of one sequence was changed. The expert
    choices stay as they were, so that each expert multiplies as many rows as before and rounds as before.
    """
    batch, form = varied(session, session.batches[0]), session.plan.config.model.attention_form
    edges = batch["cu_seqlens"].tolist()
    spans = list(zip(edges, edges[1:], strict=False))
    with record_routing() as routing:
        packed = float64(session, batch, form)
    rows = []
    total = {name: torch.zeros_like(value) for name, value in packed.items() if name not in LOGITS}
    for index, (start, stop) in enumerate(spans):
        found = float64(session, alone(batch, (start, stop)), form)
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


def alone(batch: Batch, span: tuple[int, int]) -> Batch:
    """One sequence of a packed batch, as a batch of its own."""
    start, stop = span
    positions_T = torch.arange(stop - start, device=batch["positions"].device)
    edges = batch["cu_seqlens"].new_tensor([0, stop - start])
    return {
        **{key: batch[key][start:stop] for key in ("tokens", "labels")},
        "positions": positions_T,
        "cu_seqlens": edges,
    }


def changed(session: Session, batch: Batch, span: tuple[int, int]) -> Batch:
    """The same batch with every token of one sequence changed."""
    tokens_T, (start, stop) = batch["tokens"].clone(), span
    tokens_T[start:stop] = (tokens_T[start:stop] + 1) % session.plan.config.model.vocab_size
    return {**batch, "tokens": tokens_T}


def _leaks(
    session: Session, batch: Batch, form: str, before: dict[str, Tensor], index: int, span: tuple[int, int]
) -> list[TwinRow]:
    """Change every token of one sequence; compare all others bit by bit."""
    after, rows = float64(session, changed(session, batch, span), form, gradients=False), []
    for name in LOGITS & before.keys():
        change = (after[name] - before[name]).abs()
        change[slice(*span)] = 0.0
        tensor = f"{name} of the other sequences, sequence {index} changed"
        rows.append(TwinRow(kind="packed_leak", tensor=tensor, relative_error=float(change.max())))
    return rows


LOGITS = {"logits", "mtp logits"}


def _twin_row(kind: str, name: str, left: dict[str, Tensor], right: dict[str, Tensor]) -> TwinRow:
    """Relative error of one tensor; infinite where only one side has it."""
    both = name in left and name in right
    return TwinRow(kind=kind, tensor=name, relative_error=relative_norm(left[name], right[name]) if both else math.inf)


def few_tokens(batch: Batch) -> Batch:
    """The first row of an sbhd batch; a packed batch whole."""
    if "cu_seqlens" in batch:
        return batch
    return {key: value[:1] for key, value in batch.items()}


def varied(session: Session, batch: Batch) -> Batch:
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


def float64(
    session: Session,
    batch: Batch,
    form: str,
    *,
    gradients: bool = True,
    around: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    """Logits of the live weights in float64, and the gradients of a sum over the tokens of all of them.

    ``around`` opens a context around the work, given the float64 model.
    """
    model, state = _float64_model(session, form)
    parameters = {name: state[name].requires_grad_(gradients) for name, _ in model.named_parameters()}
    with torch.set_grad_enabled(gradients), around(model):
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
