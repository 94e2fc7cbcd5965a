"""What several callbacks share: label counts, parameter names, random states, and rows as checkpoint state."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

IGNORED_LABEL = -100


def label_counts(batch: Any) -> tuple[int, int]:
    """Label tokens that count in the loss, and all positions, of a batch with integer ``labels`` of any shape.

    Raises:
        TypeError: the batch has no ``labels``; the message names the argument that counts another kind of batch.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        raise TypeError(
            f'a batch of type {type(batch).__name__} has no tensor batch["labels"] to count: hand in '
            "counts=lambda batch: (label tokens, positions)"
        )
    return int((labels != IGNORED_LABEL).sum()), labels.numel()


def trainable(
    module: nn.Module, prefix: str = "", optimizers: Iterable[torch.optim.Optimizer] = ()
) -> list[tuple[str, nn.Parameter]]:
    """Parameters that take a gradient, by name; ``prefix`` (as ``model.``) is taken off names that start with it.

    A parameter that an optimizer of ``optimizers`` updates and that the module does not know (it stands in a plain
    list, say) has no name; it is called after its place in the optimizer, so that it is looked at too.
    """
    found = [(name.removeprefix(prefix), p) for name, p in module.named_parameters() if p.requires_grad]
    known = {id(p) for p in module.parameters()}
    for number, optimizer in enumerate(optimizers):
        for group_number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad and id(parameter) not in known:
                    known.add(id(parameter))
                    place = f"optimizer {number} group {group_number} parameter {index}"
                    found.append((f"{place} (no module owns it)", parameter))
    return found


def refuse_manual_optimization(callback: object, module: Any) -> None:
    """ValueError for a module that steps its optimizers itself: its losses and batches cannot be tied to steps."""
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(callback).__name__} follows Lightning's automatic optimization; {type(module).__name__} sets "
            "automatic_optimization = False"
        )


def random_states() -> tuple[Tensor, list[Tensor], Any]:
    """Random states of torch (CPU, and every CUDA device in use) and of Python."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda, random.getstate()


def set_random_states(states: tuple[Tensor, list[Tensor], Any]) -> None:
    """Set what ``random_states`` returned."""
    cpu, cuda, python = states
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)


@contextlib.contextmanager
def random_states_from(states: tuple[Tensor, list[Tensor], Any]) -> Iterator[None]:
    """Draw from ``states`` inside; what was drawn leaves no trace outside."""
    before = random_states()
    set_random_states(states)
    try:
        yield
    finally:
        set_random_states(before)


def rows_to_state(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Dataclass rows as plain dictionaries, which a checkpoint can hold."""
    return [dict(vars(row)) for row in rows]
