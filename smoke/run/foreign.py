"""Files of ``torch.save`` that may come from anybody, read as data.

``weights_only`` keeps torch from running what a pickle asks for. It does not keep a damaged or crafted file from
raising whatever its reader stumbles over, from warning across the terminal, nor from unpacking a few kilobytes to all
memory; here each of these is a ``ForeignError`` of one line. Only the archives that torch writes today are read, not
the bare pickles of torch before 1.6, whose reader fails in the most ways.

Limits: an archive can hold as many bytes as it is long, so whoever takes files from strangers still limits their size;
and what the values mean is the caller's to check.
"""

from __future__ import annotations

import pathlib
import pickle
import warnings
import zipfile
from typing import Any

import torch

# What torch 2.11 to 2.13 raised in tens of thousands of damaged archives.
_UNREADABLE = (
    OSError,
    EOFError,
    pickle.UnpicklingError,
    RuntimeError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    NotImplementedError,
    zipfile.BadZipFile,
)


class ForeignError(ValueError):
    """A file holds no plain values; the message is one line without the file's name."""


def load_plain(file: pathlib.Path) -> Any:
    """Tensors (on the CPU), numbers, texts and containers of them. Raises ForeignError."""
    if file.exists() and not file.is_file():
        raise ForeignError("is no regular file")
    try:
        _check_archive(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except ForeignError:
        raise
    except _UNREADABLE as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        first = (reason.splitlines() or [""])[0][:120]
        raise ForeignError(f"holds no plain tensors ({first or type(error).__name__})") from None


def _check_archive(file: pathlib.Path) -> None:
    """torch stores its records as they are, so an archive is never shorter than what it holds."""
    with open(file, "rb"):
        if not zipfile.is_zipfile(file):
            raise ForeignError("holds no plain tensors (it is no archive of torch.save)")
    with zipfile.ZipFile(file) as archive:
        packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        size = sum(entry.file_size for entry in archive.infolist())
    if packed or size > file.stat().st_size:
        raise ForeignError("holds no plain tensors (its records are compressed or overlap)")
