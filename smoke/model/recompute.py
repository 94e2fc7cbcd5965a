"""Activation recompute in plain PyTorch, for any device and any precision.

Two kinds of region, as in Megatron-core:

* ``discard`` (mla_up_proj, layernorm, moe_act): the region runs without saving, and its outputs are not kept by the
  consumers that save them either. Both come back from one replay, when backward first asks for any of them.
* ``checkpoint`` (mlp, core_attn): the outputs stay, what the region saved inside is replayed.

How: autograd's saved-tensor hooks. Hooks do not nest (the innermost pair alone runs), so one pair, that of the model's
``Recompute``, does all the packing: it numbers what a region saves instead of keeping it, recognises a region's outputs
by their storage when a consumer saves them, counts the bytes that stay, and checks that nothing that was saved is
written in place afterwards (autograd's own version check is off inside hooks): ``watch`` raises, or reports it.

What makes a replay exact: the random state of the first pass is set around it, the backend hands in one context for the
first pass and one for the replay (``context_fn``, as in ``torch.utils.checkpoint``), and the replay must save tensors
of the same number, shapes and types as the first pass did. Outputs are held until the consumers are done, so that no
new tensor can take the address of a freed one and be mistaken for it.

Limits: what a region reads must be an argument, a parameter or a constant; not for torch.compile or save_on_cpu.

The idea of discarding outputs is Megatron-core's ``CheckpointWithoutOutput``, which resizes storages instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from smoke.model.ledger import Ledger, storage_of
from smoke.model.places import Places
from smoke.model.saved import Held, Inner, InPlaceWrite, Output, Packed, SavedTensorError, Watch, unpack

__all__ = ["DISCARDING", "InPlaceWrite", "Recompute", "SavedTensorError"]

DISCARDING = ("mla_up_proj", "layernorm", "moe_act")
"""Regions whose outputs are brought back too; the others keep them."""

ContextFn = Callable[[], tuple[AbstractContextManager, Callable[[], AbstractContextManager]]]


class _Region:
    """One call of one region: what its replay needs, and what the replay brought back."""

    def __init__(self, owner: Recompute, name: str, fn: Callable[..., Any], args: tuple[Any, ...]):
        self.owner, self.name, self.fn = owner, name, fn
        self.place = f"{owner.places.here()} (region {name})"
        self.args = [owner.hold(a.detach(), f"{self.place}, argument") if isinstance(a, Tensor) else a for a in args]
        self.needs_grad = [isinstance(a, Tensor) and a.requires_grad for a in args]
        self.first_context, self.replay_context = owner.context_fn()
        self.random_state = _random_state()
        self.signature: list[tuple[torch.Size, torch.dtype]] = []
        self.places: list[str] = []
        self.restored: dict[int, Held] = {}
        self.restored_outputs: list[Tensor] = []
        self.outputs: tuple[Tensor, ...] = ()
        self.call = owner.ledger.next_call(name)
        self.versions: tuple[int, ...] = ()
        self.replaying = False

    def first_pass(self, args: tuple[Any, ...]) -> Any:
        with self.owner.running(self), self.first_context:
            result = self.fn(*args)
        self.outputs = _as_tuple(result)
        self.versions = tuple(output._version for output in self.outputs)
        return result

    def close(self) -> None:
        """Consumers are done: forget the outputs, whose storages may now be freed."""
        for output, version in zip(self.outputs, self.versions, strict=True):
            self.owner.watch.look(f"{self.place}, output", output, version)
        self.outputs = ()

    def save(self, tensor: Tensor) -> Inner | None:
        """Pack hook inside the region: number the tensor (first pass) or bring it back (replay)."""
        if not self.replaying:
            self.signature.append((tensor.shape, tensor.dtype))
            self.places.append(f"{self.owner.places.here()} (region {self.name})")
            return Inner(self, len(self.signature) - 1)
        index = len(self.restored)
        if index >= len(self.signature) or self.signature[index] != (tensor.shape, tensor.dtype):
            raise SavedTensorError(
                f"the replay of recompute region {self.name} saved {tuple(tensor.shape)} {tensor.dtype} as tensor "
                f"{index}; the first pass saved {self.signature[index : index + 1] or 'nothing more'}"
            )
        self.restored[index] = Held(tensor.detach(), self.places[index], self.owner.watch)
        return None

    def recognise(self, tensor: Tensor) -> Output | None:
        """The handle for ``tensor`` when it is a view of an output whose consumers still run."""
        for index, output in enumerate(self.outputs):
            if output.dtype == tensor.dtype and storage_of(output) == storage_of(tensor):
                return Output(self, index, tensor)
        return None

    def inner(self, index: int) -> Tensor:
        if index not in self.restored:
            self.replay()
        return self.restored.pop(index).get()

    def output(self, index: int) -> Tensor:
        if not self.restored_outputs:
            self.replay()
        return self.restored_outputs[index]

    def replay(self) -> None:
        """Run the region again under the recorded random state and the backend's replay context."""
        args = [a.get() if isinstance(a, Packed) else a for a in self.args]
        args = [
            a.detach().requires_grad_(needed) if isinstance(a, Tensor) else a
            for a, needed in zip(args, self.needs_grad, strict=True)
        ]
        self.restored.clear()
        self.replaying = True
        try:
            random_state = _random_state_set(self.random_state)
            with self.owner.running(self), torch.enable_grad(), random_state, self.replay_context():
                result = self.fn(*args)
        finally:
            self.replaying = False
        if len(self.restored) != len(self.signature):
            raise SavedTensorError(
                f"the replay of recompute region {self.name} saved {len(self.restored)} tensors; "
                f"the first pass saved {len(self.signature)}"
            )
        self.restored_outputs = [output.detach() for output in _as_tuple(result)]
        self.owner.replays[self.name] = self.owner.replays.get(self.name, 0) + 1


class Recompute:
    """The recompute regions of one model, shared by its modules.

    Args:
        regions: names of the regions to recompute.
        context_fn: called once for each call of a region; returns a context for the first pass and a function that
            makes the context of a replay.

    ``active`` switches all of it off and on again; while it is off the ledger still notes what the regions would
    discard, which is what the memory check compares with.
    """

    def __init__(self, regions: Iterable[str] = (), context_fn: ContextFn | None = None):
        self.regions = frozenset(regions)
        self.context_fn: ContextFn = context_fn or (lambda: (nullcontext(), nullcontext))
        self.active = True
        self.ledger = Ledger()
        self.replays: dict[str, int] = {}
        self.watch, self.places = Watch(), Places()
        self._running: list[_Region] = []
        self._open: list[_Region | _Watched] = []

    @contextlib.contextmanager
    def tracking(self, persistent: Iterable[Tensor] = (), root: nn.Module | None = None) -> Iterator[Ledger]:
        """Around one whole forward of ``root``, whose modules name the places where tensors are saved.

        Packs every saved tensor and counts bytes (``persistent`` tensors do not count).
        """
        self.ledger = Ledger(persistent)
        self.replays = {}
        self._open.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, unpack), self.places.followed(root):
            try:
                yield self.ledger
            finally:
                self.ledger.close()

    @contextlib.contextmanager
    def discard(self, name: str, fn: Callable[..., Any], *args: Any) -> Iterator[Any]:
        """Run ``fn(*args)``; what it saved, and the outputs that consumers inside the ``with`` save, are replayed."""
        if name not in self.regions or not torch.is_grad_enabled():
            yield fn(*args)
            return
        region, result = self._enter(name, fn, args)
        self._open.append(region)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, unpack):
                yield result
        except BaseException:
            region.outputs = ()
            raise
        finally:
            self._open.remove(region)
        region.close()

    def checkpoint(self, name: str, fn: Callable[..., Any], *args: Any) -> Any:
        """Run ``fn(*args)`` and keep its outputs; what it saved inside is replayed in backward."""
        if name not in self.regions or not torch.is_grad_enabled():
            return fn(*args)
        region, result = self._enter(name, fn, args)
        region.outputs = ()
        return result

    def is_discarded(self, tensor: Tensor) -> bool:
        """Whether a consumer may save ``tensor`` at no cost, because it is an output of an open region.

        A quantized leaf then saves its input instead of a quantized copy, and quantizes again in backward. Inside a
        region the answer is no, in the first pass and in the replay alike: whatever is saved there is discarded.
        """
        if self._running or self.ledger.scope:
            return False
        for region in self._open:
            if region.recognise(tensor):
                if self.active:
                    return True
                self.ledger.copy(tensor)
        return False

    def is_replaying(self) -> bool:
        """Whether a region is being run again at this moment."""
        return bool(self._running) and self._running[-1].replaying

    def hold(self, tensor: Tensor, place: str) -> Packed:
        """Keep an argument of a region, or number it if another region can bring it back."""
        packed = self._pack(tensor, place)
        if isinstance(packed, Held):
            self.ledger.argument(tensor)
        assert packed is not None, "a region cannot start inside the replay of another"
        return packed

    @contextlib.contextmanager
    def running(self, region: _Region) -> Iterator[None]:
        """Send what is saved meanwhile to ``region``."""
        self._running.append(region)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, unpack):
                yield
        finally:
            self._running.pop()

    def _enter(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[_Region | _Watched, Any]:
        if self.active:
            region = _Region(self, name, fn, args)
            return region, region.first_pass(args)
        for a in args:
            if isinstance(a, Tensor) and not any(region.recognise(a) for region in self._open):
                self.ledger.argument(a)
        with self.ledger.inside(name):
            result = fn(*args)
        return _Watched(name, self.ledger.next_call(name), _as_tuple(result)), result

    def _pack(self, tensor: Tensor, place: str = "") -> Packed | None:
        if self._running:
            return self._running[-1].save(tensor)
        for region in self._open:
            handle = region.recognise(tensor)
            if handle is not None:
                self.ledger.output(region.name, region.call, tensor)
                return handle if isinstance(handle, Output) else Held(tensor, place or self.places.here(), self.watch)
        self.ledger.save(tensor)
        return Held(tensor, place or self.places.here(), self.watch)


class _Watched:
    """A region that is not recomputed in this pass: its outputs are known to the ledger only."""

    def __init__(self, name: str, call: int, outputs: tuple[Tensor, ...]):
        self.name, self.call, self.outputs = name, call, outputs

    def recognise(self, tensor: Tensor) -> bool | None:
        return True if any(storage_of(o) == storage_of(tensor) for o in self.outputs) else None

    def close(self) -> None:
        self.outputs = ()


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    outputs = result if isinstance(result, tuple) else (result,)
    if not all(isinstance(output, Tensor) for output in outputs):
        raise TypeError("a recompute region returns a tensor or a tuple of tensors")
    return outputs


def _random_state() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), (torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])


@contextlib.contextmanager
def _random_state_set(state: tuple[Tensor, list[Tensor]]) -> Iterator[None]:
    cpu, cuda = state
    with torch.random.fork_rng(devices=range(len(cuda))):
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        yield
