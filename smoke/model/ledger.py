"""Bytes that autograd holds between forward and backward, by distinct storage.

The ledger is filled by the packing hooks of ``smoke.model.recompute``. With recompute off it also notes which of those
bytes the regions would discard, so that the bytes of a recomputed run can be predicted and compared exactly:

    predicted = storages saved outside the regions and not outputs of them, plus the regions' arguments,
                less the quantized copies that a leaf does not keep when its input can be brought back.

Addresses identify storages; that is safe because everything counted is alive until the forward is over, saved tensors
because autograd keeps them, and arguments of regions because the ledger does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """Address and size in bytes of the tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class Ledger:
    """Counts of one forward pass; ``persistent`` storages (parameters, buffers) never count."""

    def __init__(self, persistent: Iterable[Tensor] = ()):
        self._persistent = {storage_of(tensor) for tensor in persistent}
        self._outside: set[tuple[int, int]] = set()
        self._arguments: set[tuple[int, int]] = set()
        self._inner: dict[str, set[tuple[int, int]]] = {}
        self._outputs: dict[str, dict[tuple[int, int, int], int]] = {}
        self._copies = 0
        self._calls: list[str] = []
        self._alive: list[Tensor] = []
        self.scope: list[str] = []

    @contextlib.contextmanager
    def inside(self, region: str) -> Iterator[None]:
        """Saves made meanwhile belong to the region's inside."""
        self.scope.append(region)
        try:
            yield
        finally:
            self.scope.pop()

    def next_call(self, region: str) -> int:
        """A number of its own for each call of a region."""
        self._calls.append(region)
        return len(self._calls)

    def calls_of(self, region: str) -> int:
        """How often the region was called."""
        return self._calls.count(region)

    def save(self, tensor: Tensor) -> None:
        """A tensor that autograd keeps."""
        if self.scope:
            self._add(self._inner.setdefault(self.scope[-1], set()), tensor)
        else:
            self._add(self._outside, tensor)

    def argument(self, tensor: Tensor) -> None:
        """A tensor that a region keeps, or would keep, for its replay."""
        self._add(self._arguments, tensor)
        self._alive.append(tensor.detach())

    def close(self) -> None:
        """The forward is over: addresses need to stay distinct no longer."""
        self._alive.clear()

    def output(self, region: str, call: int, tensor: Tensor) -> None:
        """An output of the region's ``call``-th call that a consumer asked to save.

        Calls are told apart because outputs that were discarded leave their addresses to those of later calls.
        """
        storage = storage_of(tensor)
        self._outputs.setdefault(region, {})[(call, *storage)] = storage[1]

    def copy(self, tensor: Tensor) -> None:
        """A copy as large as ``tensor`` that a leaf keeps only because its input is not recomputed."""
        self._copies += tensor.numel() * tensor.element_size()

    def _add(self, storages: set[tuple[int, int]], tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage not in self._persistent:
            storages.add(storage)

    @property
    def held_bytes(self) -> int:
        """All that is kept. With recompute off this includes the insides and the outputs of the regions."""
        outputs = ({(address, size) for _, address, size in found} for found in self._outputs.values())
        return _bytes(self._outside.union(*self._inner.values(), *outputs))

    @property
    def held_with_recompute_bytes(self) -> int:
        """With recompute on: all that is kept, arguments of the regions included."""
        return _bytes(self._outside | self._arguments)

    @property
    def predicted_bytes(self) -> int:
        """With recompute off: what ``held_with_recompute_bytes`` has to be when it is on."""
        return self.held_with_recompute_bytes - self._copies

    def region_bytes(self, region: str) -> tuple[int, int]:
        """Bytes saved inside the region, and bytes of its outputs that consumers saved."""
        return _bytes(self._inner.get(region, set())), sum(self._outputs.get(region, {}).values())


def _bytes(storages: Iterable[tuple[int, int]]) -> int:
    return sum(size for _, size in storages)
