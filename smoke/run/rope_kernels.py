"""The rotary operations put through what has broken real kernels, on any device and in Triton's interpreter.

* Every output and gradient is held against the oracle in float64, with a random upstream gradient, for head counts
  that are no power of two, odd widths, strided inputs, and positions from 0 to 16384.
* Memory is poisoned: ``torch.empty`` gives NaN, so that an element that was not written shows.
* Inputs lie between NaN, and are compared bit by bit with what they were.
* Every operation is called twice: the second result has the first one's bits (a first call may be an autotuner's).
* Triton's kernels also write into views between guard elements, for several block sizes.

Shape letters: T tokens, N heads, C columns that are copied, V value columns, R rotated columns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoke.checks.rope import POSITIONS
from smoke.config import ModelConfig
from smoke.kernels.absorb.api import absorbed_key, absorbed_query
from smoke.kernels.mla_rope.api import rope_key_value, rope_query
from smoke.numerics import first_mismatch
from smoke.record import RopeRow
from smoke.run.rope_cases import GUARD, Case, Surrounded, error_row, odd_cases
from smoke.run.rope_oracle import joined, turned_back

SIZES = ((1, 0, 2), (3, 5, 20), (5, 130, 32), (6, 5, 20), (12, 130, 32), (24, 5, 20), (40, 5, 20), (96, 5, 20))
"""Heads, copied columns, rotated columns."""
GUARDED = {(5, 5, 12): ((1, 2), (2, 4), (4, 16)), (12, 5, 12): ((8, 128),)}
"""Sizes of the cases with guard elements, and the heads and copied columns of one program, at most: every block of
more than one head is partly empty in one of them, the kernels' own blocks included."""


@dataclass(frozen=True)
class Operation:
    """A differentiable operation, what it computes in float64, and its inputs by name."""

    name: str
    inputs: dict[str, Surrounded]
    outputs: tuple[str, ...]
    run: Callable[..., tuple[Tensor, ...]]
    oracle: Callable[..., tuple[Tensor, ...]]


def kernel_rows(
    impl: str, device: str, base: ModelConfig, sizes: Sequence[tuple[int, int, int]], more: Sequence[Case] = ()
) -> list[RopeRow]:
    """Rows of every case; Triton's kernels between guard elements first.

    A kernel that writes outside of its output there is not let loose on memory of others.
    """
    rows: list[RopeRow] = []
    if impl == "triton":
        rows += guard_rows(device, base)
    if any(row.kind == "outside" and row.value for row in rows):
        return rows
    for case in (*more, *odd_cases(impl, device, base, sizes)):
        rows += operation_rows(case)
    return rows


def operation_rows(case: Case) -> list[RopeRow]:
    """Errors and counts of the four operations of one case."""
    return [row for operation in _operations(case) for row in _rows(operation, case)]


def _operations(case: Case) -> Iterator[Operation]:
    tokens, heads, copied, rotated = len(case.rotation.positions), case.heads, case.copied, case.rotation.rotated
    looked_up, turned, values = case.rotation.tables, case.rotation.turned, case.copied + 2
    named: dict[str, Any] = {"cos": looked_up[0], "sin": looked_up[1], "positions_T": looked_up[2], "impl": case.impl}

    def drawn(seed: int, *columns: int) -> Surrounded:
        return Surrounded((tokens, *columns), case, outside=math.nan, seed=seed)

    q, kv = drawn(1, heads, copied + rotated), drawn(2, heads, copied + values)
    k_pe, latent = drawn(3, rotated), drawn(4, copied)

    def one(q_TNC: Tensor) -> tuple[Tensor, ...]:
        return (joined(q_TNC[..., :copied], q_TNC[..., copied:], turned),)

    def key_value(kv_TNC: Tensor, k_pe_TR: Tensor) -> tuple[Tensor, ...]:
        pe_TNR = k_pe_TR.unsqueeze(1).expand(-1, heads, -1)
        return joined(kv_TNC[..., :copied], pe_TNR, turned), kv_TNC[..., copied:].double()

    yield Operation("rope_query", {"q": q}, ("query",), lambda q: (rope_query(q, rope_dim=rotated, **named),), one)
    yield Operation(
        "rope_key_value",
        {"kv": kv, "k_pe": k_pe},
        ("key", "value"),
        lambda kv, k_pe: rope_key_value(kv, k_pe, nope_dim=copied, v_dim=values, **named),
        key_value,
    )
    yield Operation(
        "absorbed_query",
        {"q": q},
        ("query",),
        lambda q: (absorbed_query(q, lambda nope: nope, nope_dim=copied, **named),),
        one,
    )
    yield Operation(
        "absorbed_key",
        {"latent": latent, "k_pe": k_pe},
        ("key",),
        lambda latent, k_pe: (absorbed_key(latent, k_pe, **named),),
        lambda latent, k_pe: (joined(latent.unsqueeze(1), k_pe.unsqueeze(1), turned),),
    )


def _rows(operation: Operation, case: Case) -> Iterator[RopeRow]:
    names = [*operation.outputs, *(f"gradient of {name}" for name in operation.inputs)]
    before = [source.buffer.clone() for source in operation.inputs.values()]
    leaves = [source.tensor.detach().requires_grad_() for source in operation.inputs.values()]
    wanted = _with_gradients(operation.oracle, [leaf.detach().double().requires_grad_() for leaf in leaves], case)
    with poisoned():
        first, second = (_with_gradients(operation.run, leaves, case) for _ in range(2))
    for index, (name, got, want) in enumerate(zip(names, first, wanted, strict=True)):
        kind = "forward" if index < len(operation.outputs) else "gradient"
        yield error_row(kind, case, case.name, f"{operation.name}: {name}", got, want)
    counts = {
        "unwritten": sum(int(tensor.isnan().sum()) for tensor in first),
        "repeat": sum(map(_differing, first, second)),
        "input": sum(map(_differing, before, (source.buffer for source in operation.inputs.values()))),
    }
    for kind, count in counts.items():
        yield RopeRow(kind=kind, case=case.name, tensor=operation.name, position=None, value=float(count))


def _with_gradients(run: Callable[..., tuple[Tensor, ...]], leaves: list[Tensor], case: Case) -> list[Tensor]:
    """Outputs, and gradients of the inputs for a random upstream gradient that is strided too."""
    outputs = run(*leaves)
    upstream = [
        Surrounded(tuple(out.shape), case, outside=math.nan, seed=10 + i).tensor.to(out.dtype)
        for i, out in enumerate(outputs)
    ]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


def guard_rows(device: str, base: ModelConfig) -> list[RopeRow]:
    """Triton's kernels, writing between guard elements, for several block sizes."""
    cases = odd_cases("triton", device, base, GUARDED, positions=(POSITIONS[1], POSITIONS[-1]))
    return [
        row for case, blocks in zip(cases, GUARDED.values(), strict=True) for b in blocks for row in _guarded(case, b)
    ]


def _guarded(case: Case, blocks: tuple[int, int]) -> Iterator[RopeRow]:
    from smoke.kernels.mla_rope import triton as kernels

    looked_up, turned = case.rotation.tables, case.rotation.turned
    tokens, heads, copied, rotated = len(case.rotation.positions), case.heads, case.copied, case.rotation.rotated
    shapes = {
        "q": (heads, copied),
        "pe": (heads, rotated),
        "kv": (heads, 2 * copied + 2),
        "key": (heads, copied + rotated),
        "value": (heads, copied + 2),
        "k_pe": (rotated,),
    }
    x = {
        name: Surrounded((tokens, *shape), case, outside=math.nan, seed=20 + i).tensor
        for i, (name, shape) in enumerate(shapes.items())
    }
    key_pe = x["k_pe"].unsqueeze(1).expand(-1, heads, -1)
    summed = x["key"][..., copied:].double().sum(1, keepdim=True)
    kernel_calls = (
        (
            "rotate",
            {"q": x["q"].double(), "pe": joined(x["pe"][..., :0], x["pe"], turned)},
            lambda q, pe: kernels.rotate_into(x["q"], x["pe"], q, pe, looked_up, blocks=blocks),
        ),
        (
            "rotate back",
            {"q": x["q"].double(), "pe": turned_back(x["pe"], turned)},
            lambda q, pe: kernels.rotate_into(x["q"], x["pe"], q, pe, looked_up, inverse=True, blocks=blocks),
        ),
        (
            "key_value",
            {"key": joined(x["kv"][..., :copied], key_pe, turned), "value": x["kv"][..., copied:].double()},
            lambda key, value: kernels.key_value_into(x["kv"], x["k_pe"], key, value, looked_up, blocks),
        ),
        (
            "key_value_grad",
            {
                "kv": torch.cat((x["key"][..., :copied], x["value"]), dim=-1).double(),
                "k_pe": turned_back(summed, turned).squeeze(1),
            },
            lambda kv, k_pe: kernels.key_value_grad_into(x["key"], x["value"], kv, k_pe, looked_up, blocks),
        ),
    )
    name = f"{case.name}, blocks of {blocks[0]} heads and {blocks[1]} columns"
    for kernel, wanted, call in kernel_calls:
        outputs = {key: Surrounded(tuple(want.shape), case, outside=GUARD) for key, want in wanted.items()}
        call(**{key: output.tensor for key, output in outputs.items()})
        for key, output in outputs.items():
            tensor, counts = f"{kernel}: {key}", {"unwritten": output.unwritten()}
            yield error_row("forward", case, name, tensor, output.tensor, wanted[key])
            counts["outside"] = output.written_outside()
            for kind, count in counts.items():
                yield RopeRow(kind=kind, case=name, tensor=tensor, position=None, value=float(count))


def _differing(a: Tensor, b: Tensor) -> int:
    found = first_mismatch(a, b)
    return 0 if found is None else found.mismatches


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory of ``torch.empty`` is filled with NaN; flags are restored at the end."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its attribute is made at run time
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
