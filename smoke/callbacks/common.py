"""What several callbacks share: label counts, parameter names, and rows as checkpoint state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

IGNORED_LABEL = -100


def label_counts(batch: Mapping[str, Tensor]) -> tuple[int, int]:
    """Label tokens that count in the loss, and all positions, of a batch with integer ``labels`` of any shape."""
    labels = batch["labels"]
    return int((labels != IGNORED_LABEL).sum()), labels.numel()


def trainable(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Parameter]]:
    """Parameters that take a gradient, by name; ``prefix`` (as ``model.``) is taken off names that start with it."""
    return [(name.removeprefix(prefix), p) for name, p in module.named_parameters() if p.requires_grad]


def rows_to_state(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Dataclass rows as plain dictionaries, which a checkpoint can hold."""
    return [dataclasses.asdict(row) for row in rows]
