"""Every source, and every way that one can be refused: one line, before any training."""

import gzip
import os
import random
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets.utils import logging

from smoke.config import DataConfig
from smoke.data import sources
from smoke.data.sources import SEPARATOR, DataError, documents, preflight


def read(source, **options):
    """All documents of a source as byte strings, after the preflight."""
    data = DataConfig(source=str(source), **options)
    preflight(data, vocab_size=288)
    found = documents(data, seed=0, tokens=100)
    assert all(document.dtype == np.uint16 and document[-1] == SEPARATOR for document in found)
    return [bytes(document[:-1].tolist()) for document in found]


def refusal(source, **options):
    """The message of the DataError that a source must raise; one line that names the source."""
    with pytest.raises(DataError) as caught:
        read(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert f"--data.source {source}: " in message
    return message


@pytest.fixture
def write(tmp_path):
    def put(kind, content, name="input"):
        """A file with this content, as a source of this kind."""
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return f"{kind}:{path}"

    return put


@pytest.fixture
def parquet(tmp_path):
    def put(**columns):
        path = tmp_path / "table.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        return path

    return put


def test_prose_is_pythons_own_documentation():
    topics = pytest.importorskip("pydoc_data.topics").topics
    assert read("prose") == [text.encode("utf-8") for text in topics.values()]


def test_prose_without_pydoc_data(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    message = refusal("prose")
    assert "pydoc_data" in message
    assert "--data.source generated" in message


def test_text_is_one_document_of_bytes(write):
    path = write("text", "Ünïcode 🙂\n\nsecond paragraph\nno end")
    assert read(path) == ["Ünïcode 🙂\n\nsecond paragraph\nno end".encode()]


def test_text_line_ends_and_byte_order_mark(write):
    assert read(write("text", b"\xef\xbb\xbfa\r\nb\rc\n")) == [b"a\nb\nc\n"]


def test_text_in_a_path_full_of_pattern_signs(write):
    assert read(write("text", "found", name="a[1]*{x}::b.txt")) == [b"found"]


def test_text_under_home(write, tmp_path, monkeypatch):
    write("text", "at home", name="a.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("text:~/a.txt") == [b"at home"]


def test_compressed_text(write):
    assert read(write("text", gzip.compress(b"packed"))) == [b"packed"]


def test_reading_stops_at_the_most_characters(write, monkeypatch):
    monkeypatch.setattr(sources, "MOST_CHARACTERS", 10)
    assert read(write("text", "abcd\n" * 50)) == [b"abcd\nabcd\n"]


def test_jsonl_with_rows_of_differing_fields(write):
    lines = ['{"text": "one", "n": 1}', "", '{"n": {"deep": []}, "text": "two\\n2"}', '{"text": null}', '{"text": ""}']
    assert read(write("jsonl", chr(10).join(lines))) == [b"one", b"two\n2"]


def test_jsonl_text_that_looks_like_dates_stays_text(write):
    path = write("jsonl", '{"body": "2024-01-01"}\n')
    assert read(path, text_field="body") == [b"2024-01-01"]


def test_parquet_skips_null(parquet):
    path = parquet(text=["one", None, "zwö"], n=[1, 2, 3])
    assert read(f"parquet:{path}") == [b"one", "zwö".encode()]


@pytest.mark.parametrize("kind", ["large_string", "dictionary"])
def test_parquet_other_string_types(parquet, kind):
    column = pyarrow.array(["a", "b"])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    assert read(f"parquet:{parquet(body=column)}", text_field="body") == [b"a", b"b"]


def test_unknown_source_names_the_nearest():
    assert "did you mean jsonl:FILE?" in refusal("json:x")
    assert "did you mean prose?" in refusal("pros")
    assert "text:FILE" in refusal("zzz")
    assert "prose" in refusal("prose:file")


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_files_that_are_no_files(kind, write, tmp_path):
    write("text", "x", name="corpus.txt")
    assert "no such file" in refusal(f"{kind}:/missing")
    assert "is a device, a pipe or a socket" in refusal(f"{kind}:/dev/null")
    assert f"did you mean {tmp_path}/corpus.txt?" in refusal(f"{kind}:{tmp_path}/corpsu.txt")
    assert "is a directory" in refusal(f"{kind}:{tmp_path}")
    assert "no file is named" in refusal(f"{kind}:")
    assert "the file is empty" in refusal(write(kind, b""))
    assert "cannot be read" in refusal(f"{kind}:{'x' * 5000}")


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission(write):
    source = write("text", "x")
    Path(source.removeprefix("text:")).chmod(0)
    assert "cannot be read" in refusal(source)


GARBAGE = random.Random(0).randbytes(3000)


@pytest.mark.parametrize(
    "head", [b"", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"PK\x03\x04", b"Rar!\x1a\x07\x00", b"PAR1"]
)
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_binary_garbage(write, capfd, kind, head):
    assert "; name a" in refusal(write(kind, head + GARBAGE))
    assert capfd.readouterr() == ("", "")


def test_text_of_another_encoding(write):
    assert "is not UTF-8 text" in refusal(write("text", "é".encode("latin-1")))
    assert "is not UTF-8 text" in refusal(write("text", "hello".encode("utf-16")))
    assert "zero bytes" in refusal(write("text", bytes(100)))


def test_jsonl_names_the_bad_line(write):
    good = '{"text": "one", "title": "t"}\n'
    assert "line 2 is not JSON" in refusal(write("jsonl", good + "{oops}"))
    assert "line 2 is not an object" in refusal(write("jsonl", good + "[1]"))
    assert "field 'text' holds int" in refusal(write("jsonl", good + '{"text": 3}'))
    assert "surrogate" in refusal(write("jsonl", r'{"text": "\ud800"}'))
    message = refusal(write("jsonl", good), text_field="body")
    assert "line 1 has no field 'body'" in message
    assert message.endswith("text, title")


def test_parquet_wrong_column(parquet):
    path = parquet(body=["a"], n=[1], nested=[{"x": 1}])
    message = refusal(f"parquet:{path}")
    assert "column 'text' is not in the file" in message
    assert message.endswith(": body")
    assert "holds int64, not text" in refusal(f"parquet:{path}", text_field="n")
    assert "not text" in refusal(f"parquet:{path}", text_field="nested")


def test_files_without_text(write, parquet):
    assert "holds no text" in refusal(write("jsonl", '{"text": ""}'))
    assert "holds no text" in refusal(f"parquet:{parquet(text=pyarrow.array([None, ''], pyarrow.string()))}")


@pytest.mark.parametrize(
    ("options", "vocab_size", "flag"),
    [
        ({"sequence_length": 1}, 288, "--data.sequence_length 1"),
        ({"micro_batch_size": 0}, 288, "--data.micro_batch_size 0"),
        ({}, 256, "--model.vocab_size 256"),
    ],
)
def test_sizes_no_batch_can_have(options, vocab_size, flag):
    with pytest.raises(DataError, match=f"^{flag}: .* the least is"):
        preflight(DataConfig(**options), vocab_size=vocab_size)


def test_nothing_is_left_behind(write, monkeypatch, tmp_path):
    """No write to the cache folder, and no trace in the global state of datasets, random or NumPy."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = random.getstate(), np.random.get_state()[1].tolist(), logging.get_verbosity()
    read("prose")
    read(write("text", "x"))
    refusal(write("text", GARBAGE))
    assert (random.getstate(), np.random.get_state()[1].tolist(), logging.get_verbosity()) == before
    assert not cache.exists()
    assert list(Path(temporary).iterdir()) == []
