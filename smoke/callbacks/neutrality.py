"""Whether callbacks leave alone the run that they watch, hook by hook.

A callback that draws a random number, writes into a gradient, counts an amax twice or leaves the module in eval mode
measures another run than the one that trains without it. Two callbacks bracket the others (Lightning runs callbacks in
order): when a hook begins the first notes what a step reads and changes, when it ends the last looks again.

    random states        torch's (CPU and CUDA), Python's, NumPy's
    modes                grad mode, deterministic algorithms, the train/eval flag of every module
    tensors              version counter of every parameter, gradient and buffer (every in-place write moves it),
                         which tensor ``.grad`` is, ``requires_grad``, and the buffers' values (loads of routers)

The losses of the watched steps are kept too; the check compares them with those of the same steps without any
callback, which finds what a hook of a module, or a write past the version counter (``.data``), does.

Limits: other callbacks than those inside the bracket are seen by the losses alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn

from smoke.callbacks.common import rows_to_state
from smoke.record import NeutralRow

MOST_ROWS = 8
"""Changes kept of one hook; eval mode changes a flag of every module."""


class Subjects:
    """Modules, parameters and buffers of a module: a walk of its tree, done once a step."""

    def __init__(self, module: nn.Module):
        self.modules, self.parameters = list(module.modules()), list(module.parameters())
        self.buffers = list(module.buffers())


class Fingerprint:
    """What a step reads and changes, at one moment."""

    def __init__(self, of: Subjects):
        self.parts: dict[str, Any] = dict(_random_states())
        self.parts["grad mode"] = torch.is_grad_enabled()
        self.parts["deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
        self.flags = [m.training for m in of.modules]
        self.tensors = [(p._version, p.requires_grad) for p in of.parameters]
        gradients = [p.grad for p in of.parameters]
        self.gradients = [None if grad is None else (id(grad), grad._version) for grad in gradients]
        self.buffers = [(b._version, b.detach().clone()) for b in of.buffers]

    def changes(self, after: Fingerprint, module: nn.Module) -> Iterator[str]:
        """Names of what differs; they are looked up only where something does."""
        yield from (name for name in self.parts if self.parts[name] != after.parts.get(name))
        for what, before, now, names in (
            ("train/eval flag of", self.flags, after.flags, (name for name, _ in module.named_modules())),
            ("parameter", self.tensors, after.tensors, (name for name, _ in module.named_parameters())),
            ("gradient of", self.gradients, after.gradients, (name for name, _ in module.named_parameters())),
        ):
            if before != now:
                places = zip(names, before, now, strict=False)
                yield from (f"{what} {name or 'the module'}" for name, a, b in places if a != b)
        pairs = enumerate(zip(self.buffers, after.buffers, strict=True))
        for number, ((version, value), (later_version, later_value)) in pairs:
            if version != later_version or not _same(value, later_value):
                yield f"buffer {list(dict(module.named_buffers()))[number]}"


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _random_states() -> Iterator[tuple[str, Any]]:
    yield "random state of torch", torch.get_rng_state().numpy().tobytes()
    if torch.cuda.is_initialized():
        yield "random state of CUDA", [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    yield "random state of Python", random.getstate()
    kind, keys, *rest = np.random.get_state()
    yield "random state of NumPy", (kind, np.asarray(keys).tobytes(), *rest)


class _Hooks(lightning.Callback):
    """Sends every hook of training that callbacks use for measuring to ``_at``."""

    def _at(self, hook: str, trainer: Any, pl_module: Any, *rest: Any) -> None:
        raise NotImplementedError

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._at("on_fit_start", trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._at("on_train_start", trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._at("on_train_batch_start", trainer, pl_module)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._at("on_before_zero_grad", trainer, pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._at("on_before_backward", trainer, pl_module)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._at("on_after_backward", trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._at("on_before_optimizer_step", trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._at("on_train_batch_end", trainer, pl_module, outputs)


class Neutrality(_Hooks):
    """The opening side of the bracket. ``around`` gives the callbacks for ``Trainer(callbacks=...)``."""

    def __init__(self) -> None:
        self.rows: list[NeutralRow] = []
        """A row for each change."""
        self.looks: dict[str, int] = {}
        """How often each hook was compared."""
        self.losses: dict[int, str] = {}
        """Of each step: the sum over its micro-batches of what backward started from, as the float's exact hex."""
        self.closing = NeutralityClosing(self)
        self._subjects: Subjects | None = None
        self._before: Fingerprint | None = None
        self._step = 0
        self._shares: list[Tensor] = []

    def around(self, callbacks: Sequence[lightning.Callback]) -> list[lightning.Callback]:
        """The callbacks inside the bracket, in order."""
        return [self, *callbacks, self.closing]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        order = trainer.callbacks
        if self.closing not in order or order.index(self.closing) < order.index(self):
            raise ValueError("Neutrality is half a bracket: pass Trainer(callbacks=neutrality.around([...]))")

    def _at(self, hook: str, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if hook != "on_train_batch_end":  # there the step is already counted
            self._step = trainer.global_step
        if self._subjects is None or hook.endswith("_start"):
            self._subjects = Subjects(pl_module)
        self._before = Fingerprint(self._subjects)

    def compare(self, hook: str, pl_module: nn.Module) -> None:
        """The hook is over: what changed since it began?"""
        before, self._before = self._before, None
        if before is not None and self._subjects is not None:
            changes = list(before.changes(Fingerprint(self._subjects), pl_module))
            self.rows += [NeutralRow(step=self._step, hook=hook, name=name) for name in changes[:MOST_ROWS]]
            self.looks[hook] = self.looks.get(hook, 0) + 1

    def keep_loss(self, trainer: Any, outputs: Any) -> None:
        """Note the loss of a micro-batch, and close the step with its last one."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self._shares.append(loss.detach().double())
        if trainer.global_step > self._step and self._shares:
            self.losses[self._step] = float(torch.stack(self._shares).sum()).hex()
            self._shares = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": rows_to_state(self.rows), "looks": dict(self.looks), "losses": dict(self.losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [NeutralRow(**row) for row in state_dict["rows"]]
        self.looks, self.losses = dict(state_dict["looks"]), dict(state_dict["losses"])


class NeutralityClosing(_Hooks):
    """The other side: compares when all callbacks have run."""

    def __init__(self, opening: Neutrality):
        self._opening = opening

    def _at(self, hook: str, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self._opening.compare(hook, pl_module)
        if hook == "on_train_batch_end":
            self._opening.keep_loss(trainer, *rest)
