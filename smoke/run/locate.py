"""Where a red parity check begins: the first module whose forward output departs, the first whose gradient does.

A check compares ends: losses, gradients, weights. When one is red, the two sides are run again with probes on every
module (``smoke.probes``), from the run's start to the step of the finding, and the first call that departs in each pass
is named. Nothing here runs while all checks are green.

    recompute_parity   recompute on against off, bit by bit; a replay is held against its own first pass
    determinism        the same trajectory twice, bit by bit
    gradient_parity    the run against its BF16 twin, at the limit of the recipe for one slice
    absorbed_parity    the two forms of attention in float64, at the check's own limit
    packed_parity      a packed batch against one of its sequences alone, or against itself with a sequence changed

Limits: a departure that does not come again is not found; with quantization a fault below the recipe's limit has no
first module. Then the finding stays as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smoke.checks import Finding
from smoke.checks.values import TWIN_ERROR_MAX
from smoke.model.recompute import SavedTensorError
from smoke.model.routing import RoutingTape, record_routing, replay_routing
from smoke.module import Batch, MasterAdamW
from smoke.probes import Departure, Judge, Tape, beyond, bits_differ, departures, watching
from smoke.run import forms
from smoke.run.fit import RoutingRecorder
from smoke.run.session import Session
from smoke.trajectories import Snapshot, deterministic


@dataclass
class Located:
    """First departure of each pass, and the tensors that departed."""

    departures: list[Departure] = field(default_factory=list)
    observed: dict[str, Tensor] = field(default_factory=dict)


def step_of(finding: Finding) -> int | None:
    """The step that the finding names, if it names one."""
    found = re.search(r"\bstep (\d+)\b", f"{finding.where} {finding.detail}")
    return int(found[1]) if found else None


def locate(finding: Finding, session: Session) -> Located:
    """Run both sides of a red parity check again, from the start of a fresh session; empty for other checks."""
    locator = LOCATORS.get(finding.name)
    return locator(finding, session) if locator is not None else Located()


def words(departure: Departure) -> str:
    """One departure in words."""
    what = {
        "forward": "forward output",
        "replay": "output in a replay",
        "gradient": "gradient of the output",
        "parameter": "gradient",
    }[departure.passed]
    call = f" call {departure.call}" if departure.call else ""
    part = f"[{departure.slice}]" if departure.slice else ""
    index = f" at {list(departure.first_index)}" if departure.first_index else ""
    if departure.mismatches:
        size = f", {departure.mismatches} of {departure.elements} values, relative error {departure.relative_error:.3g}"
    else:
        size = f", {departure.left_hex} against {departure.right_hex}" if departure.left_hex else ""
    inputs = {True: ", its inputs agree", False: ", its inputs depart already", None: ""}[departure.inputs_agree]
    after = f", after {departure.after}" if departure.after else ""
    return f"{what} of {departure.module or 'the whole model'}{call}{part}{index}{size}{inputs}{after}"


def _bitwise(finding: Finding, session: Session) -> Located:
    """Recompute on against off; where the run has no such difference, or it is noise, on against on again."""
    noise = finding.name == "determinism" or "run twice differs" in finding.detail
    step, optimizer = step_of(finding) or 0, session.optimizer()
    snapshot = Snapshot.take(session.module, optimizer)
    with deterministic():
        left = _tape_of_step(session, optimizer, step, recompute=True)
        snapshot.restore(session.module, optimizer)
        right = _tape_of_step(session, optimizer, step, recompute=noise)
    return _located(finding.name, left, right, session)


def _tape_of_step(session: Session, optimizer: MasterAdamW, step: int, *, recompute: bool) -> Tape:
    """Train to ``step`` and note what happens in it."""
    session.recompute.active = recompute
    train, windows, tape = session.step(optimizer), session.windows, Tape()
    with contextlib.suppress(SavedTensorError):
        for number in range(step):
            train(windows[number % len(windows)], lambda: None)
        with watching(session.model, session.recompute.is_replaying) as tape:
            train(windows[step % len(windows)], lambda: tape.parameter.update(_gradients(session)))
    return tape


def _gradients(session: Session) -> dict[tuple[str, int, int], Tensor]:
    """Gradients of the parameters, the last one first."""
    parameters = reversed(list(session.model.named_parameters()))
    return {(name, 0, 0): p.grad.detach().clone() for name, p in parameters if p.grad is not None}


def _against_twin(finding: Finding, session: Session) -> Located:
    """The run against its BF16 twin at the same weights, with the run's expert choices."""
    step, optimizer, recorder = step_of(finding) or 0, session.optimizer(), RoutingRecorder()
    train, windows, right = session.step(optimizer), session.windows, Tape()
    window = windows[step % len(windows)]

    def ask_twin() -> None:
        nonlocal right
        routing = recorder.stop()
        left.parameter.update(_gradients(session))
        gradients = []
        with watching(session.twin.model) as right:
            for number, batch in enumerate(window):
                gradients.append(session.reference_gradients(batch, _part(routing, number, len(window))))
        names = reversed(list(dict.fromkeys(name for one in gradients for name in one)))
        for name in names:
            parts = [one[name].double() for one in gradients if name in one]
            right.parameter[name, 0, 0] = torch.stack(parts).sum(0) / len(window)

    for number in range(step):
        train(windows[number % len(windows)], lambda: None)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(recorder.stop)
        left = cleanup.enter_context(watching(session.model, session.recompute.is_replaying))
        recorder.start()
        train(window, ask_twin)
    left.replay.clear()
    limit = session.plan.recipe.limits.gradient_error_slice_max
    return _located(finding.name, left, right, session, beyond(limit), same_calls=False)


def _part(tape: RoutingTape, number: int, count: int) -> RoutingTape:
    """The choices of one micro-batch of ``count``."""
    sizes = {router: len(choices) // count for router, choices in tape.choices.items()}
    return RoutingTape({r: tape.choices[r][number * size : (number + 1) * size] for r, size in sizes.items()})


def _forms(finding: Finding, session: Session) -> Located:
    """Absorbed attention against plain attention."""
    batch = forms.varied(session, forms.few_tokens(session.batches[0]))
    absorbed, plain = (_float64_tape(session, batch, form) for form in ("absorbed", "plain"))
    return _located(finding.name, absorbed, plain, session, beyond(TWIN_ERROR_MAX), same_calls=False)


def _packed(finding: Finding, session: Session) -> Located:
    """The first sequence that differs from itself alone; for a leak, what changes outside the changed sequence."""
    batch, form = forms.varied(session, session.batches[0]), session.plan.config.model.attention_form
    edges, tokens = batch["cu_seqlens"].tolist(), batch["tokens"].numel()
    spans, named = list(zip(edges, edges[1:], strict=False)), re.search(r"\bsequence (\d+)\b", finding.where)
    with record_routing() as routing:
        packed = _float64_tape(session, batch, form)
    if named and "changed" in finding.where:
        start, stop = spans[int(named[1])]
        with replay_routing(routing):
            changed = _float64_tape(session, forms.changed(session, batch, (start, stop)), form)
        found = []
        for rows in ((0, start), (stop, tokens)):
            left, right = (Tape(forward=tape.part(rows, tokens).forward) for tape in (changed, packed))
            found.append(_located(finding.name, left, right, session, same_calls=False))
        return next((one for one in found if one.departures), Located())
    for number in [int(named[1])] if named else range(len(spans)):
        start, stop = spans[number]
        alone = _float64_tape(session, forms.alone(batch, (start, stop)), form)
        left = packed.part((start, stop), tokens)
        right = alone.part((0, stop - start), stop - start)
        one = _located(finding.name, left, right, session, beyond(TWIN_ERROR_MAX), same_calls=False)
        if one.departures:
            return one
    return Located()


def _float64_tape(session: Session, batch: Batch, form: str) -> Tape:
    tape = Tape()

    @contextlib.contextmanager
    def watched(model: torch.nn.Module):
        nonlocal tape
        with watching(model) as tape:
            yield

    found = forms.float64(session, batch, form, around=watched)
    prefix = "gradient of "
    tape.parameter = {
        (name.removeprefix(prefix), 0, 0): value for name, value in reversed(found.items()) if name.startswith(prefix)
    }
    return tape


def _located(
    check: str, left: Tape, right: Tape, session: Session, departs: Judge = bits_differ, *, same_calls: bool = True
) -> Located:
    found = departures(left, right, departs, slices=session.model.gradient_slices(), same_calls=same_calls)
    located = Located(found)
    for one in found:
        sides = {"left": left, "right": left if one.passed == "replay" else right}
        for side, tape in sides.items():
            seen = getattr(tape, "forward" if (side, one.passed) == ("right", "replay") else one.passed)
            tensor = seen.get((one.module, one.call, one.part))
            if tensor is not None:
                located.observed[f"{check}.{one.passed}.{side}"] = tensor
        for key, tensor in left.inputs.items():
            if key[:2] == (one.module, one.call):
                located.observed[f"{check}.{one.passed}.input {key[2]}"] = tensor
    located.observed = {name: tensor.cpu() for name, tensor in located.observed.items()}
    return located


LOCATORS: dict[str, Callable[[Finding, Session], Located]] = {
    "recompute_parity": _bitwise,
    "determinism": _bitwise,
    "gradient_parity": _against_twin,
    "absorbed_parity": _forms,
    "packed_parity": _packed,
}


def told(finding: Finding, located: Located) -> Finding:
    """The finding with the departures in its detail."""
    parts = [finding.detail, *(f"first {words(one)}" for one in located.departures)]
    return dataclasses.replace(finding, detail="; ".join(part for part in parts if part))
