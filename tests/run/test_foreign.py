"""Checkpoints and bundles from anybody: plain values or one line; no code, no warning, no more memory than the file."""

from __future__ import annotations

import io
import os
import pathlib
import random
import zipfile

import pytest
import torch

from smoke.run.foreign import ForeignError, load_plain

GOOD = {"global_step": 3, "smoke": {"options": {"seed": 1}}, "a": torch.ones(2, 2, dtype=torch.bfloat16)}


def saved(values: object, **options: bool) -> bytes:
    file = io.BytesIO()
    torch.save(values, file, **options)
    return file.getvalue()


@pytest.fixture
def file(tmp_path) -> pathlib.Path:
    return tmp_path / "a.ckpt"


def refusal(file: pathlib.Path) -> str:
    with pytest.raises(ForeignError) as caught:
        load_plain(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_values_are_read(file):
    file.write_bytes(saved(GOOD))
    loaded = load_plain(file)
    assert loaded["smoke"] == GOOD["smoke"]
    assert torch.equal(loaded["a"], torch.ones(2, 2, dtype=torch.bfloat16))


class Attack:
    def __init__(self, file: pathlib.Path):
        self.file = file

    def __reduce__(self):
        return pathlib.Path.touch, (self.file,)


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "bare pickle"])
def test_no_code_runs(file, tmp_path, zipped):
    file.write_bytes(saved({**GOOD, "b": Attack(tmp_path / "ran")}, _use_new_zipfile_serialization=zipped))
    assert "holds no plain tensors" in refusal(file)
    assert not (tmp_path / "ran").exists()


def test_damaged_archives_are_one_line_each(file, recwarn, capsys):
    """Bytes replaced, cut off and put in. What is still sound is read; nothing else is raised or printed."""
    draw, sound, refused = random.Random(0), saved(GOOD), 0
    for _ in range(300):
        content = bytearray(sound)
        for _ in range(draw.choice([1, 1, 2, 5])):
            place, kind = draw.randrange(len(content)), draw.random()
            if kind < 0.7:
                content[place] = draw.randrange(256)
            elif kind < 0.85:
                del content[max(place, 1) :]
            else:
                content[place:place] = draw.randbytes(draw.randrange(1, 9))
        file.write_bytes(content)
        try:
            load_plain(file)
        except ForeignError as error:
            refused += "\n" not in str(error)
    assert 150 < refused < 300
    assert not recwarn.list
    assert capsys.readouterr() == ("", "")


def test_a_compressed_record_is_not_unpacked(file):
    """16 MiB of zeros in 20 KB; the same trick with more zeros takes all memory."""
    file.write_bytes(saved({"a": torch.zeros(1 << 22)}))
    with zipfile.ZipFile(file) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    assert file.stat().st_size < 100_000
    assert "compressed" in refusal(file)


def test_what_is_no_file_is_not_read(file, tmp_path):
    os.mkfifo(file)
    assert refusal(file) == "is no regular file"
    assert refusal(tmp_path) == "is no regular file"
    assert refusal(pathlib.Path("/dev/zero")) == "is no regular file"
    assert "No such file" in refusal(tmp_path / "missing")
