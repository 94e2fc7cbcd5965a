"""What every module call put out and which gradient came back to it: two such tapes, and where they part.

A red parity check says which loss, gradient or weight differs at the end of a step. ``watching`` notes what happened on
the way there: the inputs and outputs of every module call in the order of the forward, those of calls that are made
again while a recompute region is replayed, and the gradient of every output in the order of the backward.
``departures`` lays two tapes side by side and names the first call of each pass that departs. Parents end after
their children, so the first one is the innermost module. If its inputs agree the fault is inside it, otherwise it is
in what runs between the last call that agrees and this one, under no module of its own.

Hooks read and copy, nothing else: values, graph and saved tensors stay as they are. They cost two copies of all module
outputs of one step, which is why a run probes nothing before a check is red.

Limits: a tensor that no module returns is seen through its consumers only. A replay is taken for that of the module's
last call that was not replayed yet, since a backward goes through the calls in reverse.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smoke.numerics import first_mismatch, relative_norm

Call = tuple[str, int]
"""Module name and number of the call."""
Key = tuple[str, int, int]
"""Module name, number of the call, and number of the tensor among its outputs."""
Slices = Mapping[str, Sequence[tuple[str, int, int]]]
"""Parts of parameters along their first dimension, which are parts of their module's output along the last."""


@dataclass
class Tape:
    """Copies of what was seen in one step, each mapping in the order of events."""

    inputs: dict[Key, Tensor] = field(default_factory=dict)
    forward: dict[Key, Tensor] = field(default_factory=dict)
    replay: dict[Key, Tensor] = field(default_factory=dict)
    """Outputs of calls made again in the backward, under the keys of their first passes."""
    gradient: dict[Key, Tensor] = field(default_factory=dict)
    """Gradients of the outputs of ``forward``, in the order in which the backward reached them."""
    parameter: dict[Key, Tensor] = field(default_factory=dict)
    """Gradients of parameters (name, 0, 0), filled by whoever runs the step; the last parameter comes first."""

    def part(self, rows: tuple[int, int], tokens: int) -> Tape:
        """Rows from the first to before the second, of all tensors with ``tokens`` rows; other tensors are left out."""
        start, stop = rows
        names = [f.name for f in dataclasses.fields(self)]
        return Tape(
            **{
                name: {k: t[start:stop] for k, t in getattr(self, name).items() if t.dim() and t.shape[0] == tokens}
                for name in names
            }
        )


@contextlib.contextmanager
def watching(module: nn.Module, replaying: Callable[[], bool] = lambda: False) -> Iterator[Tape]:
    """Fill a tape from the calls of ``module`` and all modules in it.

    Args:
        module: the module; names on the tape are those of ``named_modules``, its own is empty.
        replaying: whether a recompute region is being replayed at this moment.
    """
    tape, counts, handles = Tape(), Counts(), []
    for name, inner in module.named_modules():
        before, after = _hooks(tape, counts, name, replaying)
        handles += [inner.register_forward_pre_hook(before), inner.register_forward_hook(after)]
    try:
        yield tape
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Counts:
    """Calls of each module so far."""

    calls: dict[str, int] = field(default_factory=dict)
    pending: dict[str, list[int]] = field(default_factory=dict)
    """Calls that were not replayed yet."""

    def next_call(self, name: str) -> int:
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        self.pending.setdefault(name, []).append(call)
        return call

    def replayed(self, name: str) -> int:
        pending = self.pending.get(name)
        return pending.pop() if pending else self.calls.get(name, 0) - 1


def _hooks(tape: Tape, counts: Counts, name: str, replaying: Callable[[], bool]) -> tuple[Any, Any]:
    """A forward pre-hook and a forward hook of one module."""

    def before(inner: nn.Module, args: tuple[Any, ...]) -> None:
        if not replaying():
            call = counts.calls.get(name, 0)
            for part, tensor in enumerate(tensors_of(args)):
                tape.inputs[name, call, part] = tensor.detach().clone()

    def after(inner: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        again = replaying()
        seen = tape.replay if again else tape.forward
        call = counts.replayed(name) if again else counts.next_call(name)
        for part, tensor in enumerate(tensors_of(output)):
            key = (name, call, part)
            seen[key] = tensor.detach().clone()
            if tensor.requires_grad and not again:
                tensor.register_hook(lambda gradient, key=key: keep(key, gradient))

    def keep(key: Key, gradient: Tensor) -> None:
        tape.gradient[key] = gradient.detach().clone()

    return before, after


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dictionaries and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_of([getattr(value, f.name) for f in dataclasses.fields(value)])


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The first call of one pass whose tensor departs."""

    passed: str
    """forward, replay (against its own first pass), gradient (of an output) or parameter (its gradient)."""
    module: str
    """Module, or parameter; empty for the outermost module."""
    call: int
    part: int
    slice: str = ""
    """Named columns of the output, or rows of the parameter, that depart."""
    first_index: tuple[int, ...] = ()
    left_hex: str = ""
    right_hex: str = ""
    mismatches: int = 0
    elements: int = 0
    relative_error: float = math.nan
    inputs_agree: bool | None = None
    """Whether everything that entered the call agrees; None where that was not seen."""
    after: str = ""
    """The last module, or parameter, of the same pass that agrees."""


Judge = Callable[[Tensor, Tensor], bool]
"""Whether two tensors of one shape depart."""


def bits_differ(left: Tensor, right: Tensor) -> bool:
    """To the last bit."""
    return left.dtype is not right.dtype or first_mismatch(left, right) is not None


def beyond(limit: float) -> Judge:
    """Relative error over ``limit``; a NaN is over every limit, and integers and booleans must be equal."""

    def departs(left: Tensor, right: Tensor) -> bool:
        if not left.is_floating_point():
            return not torch.equal(left, right)
        return not relative_norm(left, right) <= limit

    return departs


def departures(
    left: Tape, right: Tape, departs: Judge = bits_differ, *, slices: Slices | None = None, same_calls: bool = True
) -> list[Departure]:
    """The first departure of each pass, in the order forward, replay, gradient, parameter; none where all agree.

    Args:
        left: the tape that is judged.
        right: the tape that is right. The replays of ``left`` are held against the first pass of ``left`` itself.
        departs: judges two tensors of one shape, and each slice of them.
        slices: see ``Slices``, by parameter name.
        same_calls: whether a call, or a shape, that one side alone has is a departure.
    """
    found, slices = [], slices or {}
    pairs = {
        "forward": (left.forward, right.forward),
        "replay": (left.replay, {key: left.forward[key] for key in left.replay if key in left.forward}),
        "gradient": (left.gradient, right.gradient),
        "parameter": (left.parameter, right.parameter),
    }
    for passed, (these, those) in pairs.items():
        entries = _Pair(passed, these, those, slices, departs, same_calls and passed != "replay")
        first = entries.first()
        if first is not None:
            found.append(_with_inputs(first, left, right, departs))
    return found


@dataclass
class _Pair:
    """One pass of two tapes."""

    passed: str
    left: dict[Key, Tensor]
    right: dict[Key, Tensor]
    slices: Slices
    departs: Judge
    same_calls: bool

    def first(self) -> Departure | None:
        after = ""
        for key in {**self.right, **self.left}:
            a, b = self.left.get(key), self.right.get(key)
            if a is None or b is None or a.shape != b.shape:
                if self.same_calls:
                    return self._one_sided(key, a, b, after)
                continue
            place = self._place(key[0], a, b)
            if place is not None:
                return self._departure(key, place, a, b, after)
            after = key[0] or after
        return None

    def _place(self, name: str, a: Tensor, b: Tensor) -> str | None:
        """None where nothing departs, else the slice that does, or an empty string for the whole."""
        parts = self.slices.get(name if self.passed == "parameter" else f"{name}.weight", ())
        for label, start, stop in parts:
            if self.departs(*(self._cut(x, start, stop) for x in (a, b))):
                return label
        return "" if self.departs(a, b) else None

    def _cut(self, x: Tensor, start: int, stop: int) -> Tensor:
        return x[start:stop] if self.passed == "parameter" else x[..., start:stop]

    def _one_sided(self, key: Key, a: Tensor | None, b: Tensor | None, after: str) -> Departure:
        left, right = ("absent" if x is None else f"shape {list(x.shape)}" for x in (a, b))
        return Departure(
            passed=self.passed, module=key[0], call=key[1], part=key[2], left_hex=left, right_hex=right, after=after
        )

    def _departure(self, key: Key, place: str, a: Tensor, b: Tensor, after: str) -> Departure:
        found = first_mismatch(a, b) if a.dtype is b.dtype else None
        bits: dict[str, Any] = {}
        if found is not None:
            index, left, right, count = found
            bits = {"first_index": index, "left_hex": left, "right_hex": right, "mismatches": count}
        error = relative_norm(a, b) if a.is_floating_point() else math.nan
        return Departure(
            passed=self.passed,
            module=key[0],
            call=key[1],
            part=key[2],
            slice=place,
            elements=a.numel(),
            relative_error=error,
            after=after,
            **bits,
        )


def _with_inputs(first: Departure, left: Tape, right: Tape, departs: Judge) -> Departure:
    """Say of a forward departure whether the call's inputs agree already."""
    if first.passed != "forward":
        return first
    pairs = [
        (tensor, right.inputs.get(key)) for key, tensor in left.inputs.items() if key[:2] == (first.module, first.call)
    ]
    agree = all(b is not None and a.shape == b.shape and not departs(a, b) for a, b in pairs)
    return dataclasses.replace(first, inputs_agree=agree if pairs else None)
