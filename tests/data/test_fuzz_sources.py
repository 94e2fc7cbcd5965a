"""Whatever bytes a file holds: documents, or one line that says what is wrong; never more than a bounded part of it.

Mutations of sound files reach deeper than random bytes. The examples are the same in every run.
"""

from __future__ import annotations

import gzip
import io
import pathlib
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from smoke.config import DataConfig
from smoke.data import sources
from smoke.data.sources import MOST_CHARACTERS, DataError, documents

FEW = settings(
    derandomize=True, max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LINES = b'{"text": "one", "n": 1}\n{"text": "two"}\n{"n": [], "text": null}\n' * 3


def table(**columns: object) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


TABLE = table(text=[f"line {i}" for i in range(30)], n=list(range(30)))
SOUND = [("jsonl", LINES), ("text", LINES), ("jsonl", gzip.compress(LINES)), ("parquet", TABLE)]
EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.one_of(st.integers(0, 255), st.just("cut"), st.binary(max_size=5))),
    max_size=6,
)


def changed(content: bytes, edits: list) -> bytes:
    """``content`` after each edit: a byte replaced, the end cut off, or bytes put in."""
    made = bytearray(content)
    for place, what in edits:
        place %= len(made) + 1
        if what == "cut":
            del made[place:]
        elif isinstance(what, bytes):
            made[place:place] = what
        elif place < len(made):
            made[place] = what
    return bytes(made)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("fuzz") / "input"


def outcome(kind: str, file: pathlib.Path) -> str:
    """The line of the refusal, or nothing."""
    try:
        assert documents(DataConfig(source=f"{kind}:{file}"), seed=0, tokens=10)
    except DataError as error:
        return str(error)
    return ""


@FEW
@given(st.sampled_from(SOUND), EDITS)
@example(("jsonl", b'{"text": ' + b"9" * 5000 + b"}"), [])
@example(("jsonl", b"[" * 100_000), [])
def test_any_file_is_documents_or_one_line(file, sound, edits):
    kind, content = sound
    file.write_bytes(changed(content, edits) or b"\n")
    line = outcome(kind, file)
    assert "\n" not in line
    assert line.startswith(f"--data.source {kind}:") or not line


def test_unchanged_files_are_read(file):
    """So that the test above says something about files that are nearly sound."""
    for kind, content in SOUND:
        file.write_bytes(content)
        assert outcome(kind, file) == ""


@pytest.mark.parametrize(("kind", "head"), [("text", b""), ("jsonl", b'{"text": "')])
def test_a_small_file_that_unpacks_to_one_endless_line_is_cut(file, kind, head):
    """128 MiB from 125 KB: what is read, and held, is bounded by MOST_CHARACTERS."""
    with gzip.open(file, "wb", compresslevel=6) as packed:
        packed.write(head)
        for _ in range(64):
            packed.write(b"a" * (2 << 20))
    tracemalloc.start()
    try:
        line = outcome(kind, file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 7 * MOST_CHARACTERS
    assert ("line 1 is not JSON (it is longer than 16,777,216 characters)" in line) == (kind == "jsonl")


def test_a_dictionary_column_that_unpacks_to_gigabytes_is_read_in_parts(file):
    """5 GB of text from 50 KB: a thousand rows at a time would take a gigabyte."""
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 5000, pyarrow.int32()), ["a" * 10**6])
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), file)
    before = pyarrow.total_allocated_bytes()
    found = documents(DataConfig(source=f"parquet:{file}"), seed=0, tokens=10)
    assert MOST_CHARACTERS <= sum(map(len, found)) < MOST_CHARACTERS + 2 * 10**6
    assert pyarrow.default_memory_pool().max_memory() - before < 1 << 30
    assert sources.FEW_ROWS * 10**6 < 1 << 30
