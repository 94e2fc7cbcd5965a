"""What autograd's nodes hold in place of a saved tensor: itself, or a handle to one that a replay brings back."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Source(Protocol):
    """A recompute region, seen from its handles."""

    def inner(self, index: int) -> Tensor: ...

    def output(self, index: int) -> Tensor: ...


class SavedTensorError(RuntimeError):
    """A tensor saved for backward was written in place, or a replay did not save what the first pass saved."""


class Held:
    """A tensor kept for backward, and the version that it had then."""

    def __init__(self, tensor: Tensor, where: str):
        self.tensor, self.version, self.where = tensor, tensor._version, where

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise SavedTensorError(
                f"a tensor of shape {tuple(self.tensor.shape)} saved in {self.where} was written in place "
                f"before backward used it (version {self.version} when saved, {self.tensor._version} now)"
            )
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
