"""What autograd's nodes hold in place of a saved tensor: itself, or a handle to one that a replay brings back.

A tensor that was saved and then written in place gives a wrong gradient behind a right forward, and autograd's own
check is off inside saved-tensor hooks. So a ``Watch`` compares versions when backward asks for the tensor. Versions do
not count writes through ``.data`` or through another library's pointer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """A recompute region, seen from its handles."""

    def inner(self, index: int) -> Tensor: ...

    def output(self, index: int) -> Tensor: ...


class SavedTensorError(RuntimeError):
    """A tensor saved for backward was written in place, or a replay did not save what the first pass saved."""


@dataclass(frozen=True)
class InPlaceWrite:
    """A tensor that backward needs was changed after it had been saved."""

    place: str
    """The module that saved it, and its region."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    saved_version: int
    version: int

    def __str__(self) -> str:
        return (
            f"a tensor of shape {self.shape} saved in {self.place} was written in place "
            f"before backward used it (version {self.saved_version} when saved, {self.version} now)"
        )


def refuse(write: InPlaceWrite) -> None:
    """Raise SavedTensorError."""
    raise SavedTensorError(str(write))


class Watch:
    """Looks at saved tensors when they are needed; hands a write in place to ``report``, which by default raises."""

    def __init__(self) -> None:
        self.looked = 0
        self.report: Callable[[InPlaceWrite], None] = refuse

    def look(self, place: str, tensor: Tensor, saved_version: int) -> None:
        self.looked += 1
        if tensor._version != saved_version:
            write = InPlaceWrite(place, tuple(tensor.shape), tensor.dtype, saved_version, tensor._version)
            self.report(write)


class Held:
    """A tensor kept for backward, and the version that it had then."""

    def __init__(self, tensor: Tensor, place: str, watch: Watch):
        self.tensor, self.version, self.place, self.watch = tensor, tensor._version, place, watch

    def get(self) -> Tensor:
        self.watch.look(self.place, self.tensor, self.version)
        return self.tensor


class Inner:
    """Stands for the region's ``index``-th saved tensor."""

    def __init__(self, region: Source, index: int):
        self.region, self.index = region, index

    def get(self) -> Tensor:
        return self.region.inner(self.index)


class Output:
    """Stands for a view of one of the region's outputs."""

    def __init__(self, region: Source, index: int, tensor: Tensor):
        self.region, self.index = region, index
        self.geometry = (tensor.shape, tensor.stride(), tensor.storage_offset())

    def get(self) -> Tensor:
        return self.region.output(self.index).as_strided(*self.geometry)


Packed = Held | Inner | Output


def unpack(packed: Packed) -> Tensor:
    """Unpack hook of autograd."""
    return packed.get()
