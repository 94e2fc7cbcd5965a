"""Where documents come from: one function per source, each giving a list of token arrays.

Text becomes bytes (UTF-8, ids 0..255) and every document ends with the separator, id 256. There is no other tokenizer:
bytes need no download, and a smoke test asks whether the numbers of a training step are right, not how good a
language model gets.

* ``prose``: the reference texts in ``pydoc_data.topics``, about 465 KB of real English that CPython ships. They differ
  between Python versions, so compare losses across machines on ``generated``.
* ``generated``: see ``smoke.data.generated``.
* ``text:FILE`` (the file is one document; line ends become ``\\n``), ``jsonl:FILE`` and ``parquet:FILE`` (a document
  for each row, in the column ``--data.text_field``; empty and null texts are passed over).

Text and JSON lines are read here, line by line, also when compressed with gzip, bz2 or xz: a loader that infers a
schema stumbles over rows whose other fields differ and cannot say which line is bad, and one that waits for the end of
a line takes in gigabytes where a small compressed file has none. Parquet is read by Hugging Face ``datasets`` as a
stream: nothing is downloaded, no cache is written, its log and progress bars stay silent. Reading stops at
``MOST_CHARACTERS``.

Everything that can be wrong with a source is a ``DataError`` of one line, raised before any training. A source may be
shorter than the whole run (it is then read again in a new order), but not shorter than one batch.
"""

from __future__ import annotations

import bz2
import contextlib
import difflib
import gzip
import json
import lzma
import os
import pathlib
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

import numpy as np

from smoke.config import DataConfig
from smoke.data.generated import SEPARATOR, generated_documents

MOST_CHARACTERS = 1 << 24
"""Reading a file stops with the row (or line) that reaches this size; a line is cut there."""
FEW_ROWS = 64
"""Rows of Parquet in memory at a time: in a column with a dictionary, a few bytes can stand for a long text."""
COMPRESSED: dict[bytes, Callable[..., TextIO]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
"""First bytes of compressed files."""
FILE_KINDS = ("text", "jsonl", "parquet")
LEGAL = "prose, generated, text:FILE, jsonl:FILE or parquet:FILE"
LEAST_VOCABULARY = SEPARATOR + 1
# UnicodeDecodeError and pyarrow's ArrowInvalid are ValueErrors; the others come from compressed files that are damaged,
# or of a kind that ``datasets`` cannot open.
_UNREADABLE = (ValueError, EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, NotImplementedError)


class DataError(ValueError):
    """The data asked for cannot be had; the message is one line: what was asked, what blocks it, what works."""


def _refusal(data: DataConfig, problem: str, remedy: str) -> DataError:
    return DataError(f"--data.source {data.source}: {problem}; {remedy}")


def preflight(data: DataConfig, *, vocab_size: int) -> None:
    """Refuse what needs no reading to be refused: an unknown source, a missing file, sizes no batch can have."""
    kind, colon, name = data.source.partition(":")
    if data.sequence_length < 2:
        raise DataError(f"--data.sequence_length {data.sequence_length}: a sequence needs a label; the least is 2")
    if data.micro_batch_size < 1:
        raise DataError(f"--data.micro_batch_size {data.micro_batch_size}: a batch needs a row; the least is 1")
    if vocab_size < LEAST_VOCABULARY:
        problem = f"bytes and the separator take ids up to {SEPARATOR}; the least is {LEAST_VOCABULARY}"
        raise DataError(f"--model.vocab_size {vocab_size}: {problem}")
    if kind in FILE_KINDS and colon:
        _check_file(data, name)
    elif data.source not in ("prose", "generated"):
        raise _refusal(data, "no such source", _nearest(data.source))


def _nearest(source: str) -> str:
    close = difflib.get_close_matches(source.partition(":")[0], ("prose", "generated", *FILE_KINDS), n=1)
    meant = f"did you mean {close[0]}{':FILE' if close[0] in FILE_KINDS else ''}? " if close else ""
    return f"{meant}legal are {LEGAL}"


def _check_file(data: DataConfig, name: str) -> None:
    if not name:
        raise _refusal(data, "no file is named", f"write {data.source}FILE")
    path = _path(name)
    try:
        if path.is_dir():
            raise _refusal(data, "is a directory", "name one file in it")
        if path.exists() and not path.is_file():
            raise _refusal(data, "is a device, a pipe or a socket", "name a regular file")
        if not path.is_file():
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            close = difflib.get_close_matches(path.name, siblings, n=1)
            meant = f"did you mean {path.parent / close[0]}?" if close else "use --data.source generated"
            raise _refusal(data, "no such file", meant)
        if path.stat().st_size == 0:
            raise _refusal(data, "the file is empty", "name a file that holds text, or use --data.source generated")
    except OSError as error:
        raise _refusal(data, f"cannot be read ({error.strerror})", "name a readable file") from error


def _path(name: str) -> pathlib.Path:
    """A leading ~ is expanded here, because a shell leaves it alone after ``text:``."""
    return pathlib.Path(os.path.expanduser(name))


def documents(data: DataConfig, *, seed: int, tokens: int) -> list[np.ndarray]:
    """All documents of the source, each uint16 with the separator at its end.

    ``generated`` makes at least ``tokens`` tokens from ``seed``; the other sources give all they have, whatever both
    say. Raises DataError where the source cannot be read or gives no text.
    """
    kind, _, name = data.source.partition(":")
    if kind == "generated":
        return generated_documents(seed, tokens)
    if kind == "prose":
        found = _encode(data, _prose(data))
    elif kind == "parquet":
        found = _encode(data, _parquet(data, name))
    else:
        lines = _lines(data, name)
        found = _encode(data, _json_texts(data, lines) if kind == "jsonl" else _whole(data, lines))
    if not found:
        raise _refusal(data, "holds no text", "name a file that does, or use --data.source generated")
    return found


def _encode(data: DataConfig, texts: Iterable[str]) -> list[np.ndarray]:
    """Texts to token arrays; empty ones give none."""
    found = []
    for text in filter(None, texts):
        try:
            token = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
        except UnicodeEncodeError:
            raise _refusal(data, "holds half of a surrogate pair, which is not text", "remove it") from None
        found.append(np.append(token, np.uint16(SEPARATOR)).astype(np.uint16))
    return found


def _prose(data: DataConfig) -> list[str]:
    try:
        from pydoc_data import topics
    except ImportError:
        problem = "this Python comes without pydoc_data (a stripped installation)"
        raise _refusal(data, problem, "use --data.source generated, or text:FILE") from None
    with _quiet_datasets() as (datasets, _):
        return _column(datasets.Dataset.from_dict({"text": list(topics.topics.values())}), "text")


def _parquet(data: DataConfig, name: str) -> list[str]:
    with _readable(data, "Parquet"), _quiet_datasets() as (datasets, folder):
        options = {"cache_dir": folder, "streaming": True, "batch_size": FEW_ROWS}
        dataset = datasets.Dataset.from_parquet(_link(folder, name), **options)
        kinds = {column: getattr(feature, "dtype", "nested") for column, feature in dataset.features.items()}
        legal = [column for column, kind in kinds.items() if "string" in kind]
        if data.text_field not in legal:
            has = kinds.get(data.text_field)
            problem = f"column {data.text_field!r} " + (f"holds {has}, not text" if has else "is not in the file")
            named = ", ".join(legal) or "none in this file"
            raise _refusal(data, problem, f"--data.text_field takes a column of text: {named}")
        return _column(dataset, data.text_field)


def _lines(data: DataConfig, name: str) -> list[str]:
    """Lines of a UTF-8 file, each with a ``\\n`` at its end, until MOST_CHARACTERS."""
    lines: list[str] = []
    size = 0
    with _readable(data, "UTF-8 text"), _text_stream(_path(name)) as stream:
        while size < MOST_CHARACTERS and (line := stream.readline(MOST_CHARACTERS)):
            lines.append(line)
            size += len(line)
    return lines


def _text_stream(path: pathlib.Path) -> TextIO:
    """The file, decompressed where its first bytes say so, as text without a byte order mark."""
    with open(path, "rb") as file:
        head = file.read(6)
    opener = next((opener for magic, opener in COMPRESSED.items() if head.startswith(magic)), open)
    return opener(path, "rt", encoding="utf-8-sig")


def _column(dataset, column: str) -> list[str]:
    """The texts of a column, without null, until MOST_CHARACTERS."""
    texts: list[str] = []
    size = 0
    for batch in dataset.iter(batch_size=FEW_ROWS):
        for text in batch[column]:
            if text is not None:
                texts.append(text)
                size += len(text)
            if size >= MOST_CHARACTERS:
                return texts
    return texts


def _whole(data: DataConfig, lines: Iterable[str]) -> list[str]:
    """One document of all lines."""
    text = "".join(lines)
    if "\0" in text:
        raise _refusal(data, "holds zero bytes, so it is not text", "name a text file")
    return [text]


def _json_texts(data: DataConfig, lines: Iterable[str]) -> list[str]:
    rows = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    return [_json_text(data, number, line) for number, line in rows]


def _json_text(data: DataConfig, number: int, line: str) -> str:
    """The text in one JSON line; empty where it is null."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # ValueError: no JSON, or a number of thousands of digits
        long = f" (it is longer than {MOST_CHARACTERS:,} characters)" if len(line) >= MOST_CHARACTERS else ""
        raise _refusal(data, f"line {number} is not JSON{long}", "write one object on each line") from None
    if not isinstance(row, dict):
        raise _refusal(data, f"line {number} is not an object", 'write lines like {"text": "..."}')
    legal = ", ".join(field for field, value in row.items() if isinstance(value, str)) or "none in this line"
    remedy = f"--data.text_field takes a field of text: {legal}"
    if data.text_field not in row:
        raise _refusal(data, f"line {number} has no field {data.text_field!r}", remedy)
    text = row[data.text_field]
    if text is not None and not isinstance(text, str):
        problem = f"line {number}: field {data.text_field!r} holds {type(text).__name__}, not text"
        raise _refusal(data, problem, remedy)
    return text or ""


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[tuple]:
    """The module ``datasets``, silent, and a folder that takes the place of the user's cache while it reads."""
    import datasets
    from datasets.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix="smoke-data-") as folder:
            yield datasets, folder
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _readable(data: DataConfig, form: str) -> Iterator[None]:
    """What goes wrong while a file is read, as a DataError."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        problem = f"cannot be read ({error.strerror or _first_line(error)})"
        raise _refusal(data, problem, f"name a readable file of {form}") from error
    except _UNREADABLE as error:
        raise _refusal(data, f"is not {form} ({_first_line(error)})", f"name a file of {form}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:160] or type(error).__name__


def _link(folder: str, name: str) -> str:
    """A link of a plain name: ``datasets`` takes brackets, stars and '::' in a path for patterns and chains."""
    link = pathlib.Path(folder, "input")
    link.symlink_to(_path(name).resolve())
    return str(link)
