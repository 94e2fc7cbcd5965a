"""Which module is running, so that what happens inside it can be named.

Hooks that torch calls around every module's forward, present only inside ``followed``; they look at nothing but the
module itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Places:
    """The names of a model's modules that are running, the innermost last."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._running: list[str] = []

    @contextlib.contextmanager
    def followed(self, root: nn.Module | None) -> Iterator[None]:
        """Follow the modules of ``root`` (none: every place is called the model) through one forward."""
        if root is None:
            yield
            return
        self._names = {id(module): name for name, module in root.named_modules()}
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()

    def here(self) -> str:
        """Name of the innermost module that is running and known."""
        return next((name for name in reversed(self._running) if name), "the model")

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names.get(id(module), ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()
