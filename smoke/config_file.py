"""YAML files of options (``--config FILE``): read as data, never as code, and every key held against the tree.

A YAML file, relative to the working directory, holds what differs from the defaults. Its keys and nulls are checked
here, before jsonargparse sees the file: it would pass an unknown key whose value is an empty mapping, a null where
none is legal, and of a key that stands twice the last.

A file from elsewhere can do no harm: tags of Python are refused, a device or a pipe is not read, and neither a large
file nor a small one whose aliases stand for billions of values is taken in.

A mistake is a ``UsageError`` of one line that names the file and the key.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from smoke.config import (
    CheckConfig,
    DataConfig,
    ModelConfig,
    PolicyConfig,
    RopeScaling,
    RunConfig,
    TrainConfig,
    TrainerConfig,
    nearest,
)
from smoke.output import printable

SECTIONS = {
    "model": ModelConfig,
    "model.rope_scaling": RopeScaling,
    "data": DataConfig,
    "train": TrainConfig,
    "policy": PolicyConfig,
    "check": CheckConfig,
    "trainer": TrainerConfig,
}
"""Dataclass of every group of options."""
NULLABLE = {
    f.name for owner in (RunConfig, *SECTIONS.values()) for f in dataclasses.fields(owner) if "None" in str(f.type)
}
"""Options that may be null."""
MOST_BYTES, MOST_VALUES = 1 << 20, 10_000
"""Largest file, and most values in it, with those behind an alias counted wherever it stands."""


class UsageError(Exception):
    """The command line or a file it names is wrong; the message is one line, whatever was typed."""

    def __init__(self, message: str):
        super().__init__(printable(message))


def check_files(args: Sequence[str]) -> None:
    """Raise UsageError for the first mistake in the files that the command line names."""
    for file in _config_files(args):
        _check_keys(_load(file), RunConfig, file)


def _config_files(args: Sequence[str]) -> Iterator[str]:
    for argument, following in zip(args, [*args[1:], ""], strict=False):
        if argument == "--config":
            yield following
        elif argument.startswith("--config="):
            yield argument.partition("=")[2]


class _Loader(yaml.SafeLoader):
    """Data only, no tags of Python; a key that stands twice is an error, where YAML's own loader drops the first."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _load(file: str) -> Any:
    text = _text(file)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _check_extent(node, file)
        return loader.construct_document(node) if node else None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that is none
        raise UsageError(f"--config {file}: is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UsageError(f"--config {file}: is not YAML of options: nested too deeply") from None


def _text(file: str) -> str:
    if not file:
        raise UsageError("--config: name a file")
    path = pathlib.Path(file)
    try:
        if path.exists() and not path.is_file():
            kind = "a directory" if path.is_dir() else "a device, a pipe or a socket"
            raise UsageError(f"--config {file}: is {kind}; name a regular file")
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"--config {file}: has more than {MOST_BYTES:,} bytes, so it is no file of options")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--config {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {file}: is not UTF-8 text") from None
    except ValueError as error:  # a null character in the name
        raise UsageError(f"--config {file}: {error}") from None


def _check_extent(node: yaml.Node | None, file: str) -> None:
    """Refuse before anything is built from the nodes: an alias can double what stands before it, line by line."""
    count, waiting = 0, [node]
    while waiting:
        count += 1
        if count > MOST_VALUES:
            raise UsageError(f"--config {file}: stands for more than {MOST_VALUES:,} values (aliases repeat theirs)")
        one = waiting.pop()
        for child in one.value if isinstance(one, yaml.CollectionNode) else ():
            waiting.extend(child if isinstance(child, tuple) else (child,))


def _check_keys(values: Any, owner: type, file: str, path: str = "") -> None:
    """Every key of a mapping names a field of ``owner``, whatever its value."""
    if values is None and not path:
        raise UsageError(f"--config {file}: holds no options")
    if not isinstance(values, dict):
        raise UsageError(f"--config {file}: {path.rstrip('.') or 'the file'} must be a mapping of options")
    names = [f.name for f in dataclasses.fields(owner)]
    for key, value in values.items():
        if key not in names:
            close = path + nearest(str(key), names)
            raise UsageError(f"--config {file}: no option {path}{key}; the nearest is {close}")
        group = SECTIONS.get(f"{path}{key}")
        if value is None and key in NULLABLE:
            continue
        if group:
            _check_keys(value, group, file, f"{path}{key}.")
        elif value is None:
            raise UsageError(f"--config {file}: {path}{key} is null; give it a value, or leave it out for its default")


TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple": "a list of words",
    "str": "text",
    "RopeScaling": "a mapping of its options",
    "NoneType": "null",
}


def one_line(message: str) -> str:
    """jsonargparse's message as one line that begins with the option."""
    text = " ".join(message.split()).removeprefix("argument ")
    key = re.match(r'Parser key "([^"]+)": ', text)
    if not key:
        return text
    inner = re.search(r"--(\w+): (must be .*?, got .*?) - ", text)  # of a nested parser, which came through here before
    if inner:
        return f"--{key[1]}.{inner[1]}: {inner[2]}"
    union = re.search(r"Union subtypes Subtypes: \[(.*?)\] .*?Given value: ?(.*)", text)
    if union:
        kinds = re.findall(r"<class '(?:\w+\.)*(\w+)'>", union[1])
        legal = " or ".join(TYPE_NAMES.get(kind, kind) for kind in kinds)
        return f"--{key[1]}: must be {legal}, got {union[2] or 'nothing'}"
    wrong = re.search(r"Expected an? <class '(?:\w+\.)*(\w+)'>\. Got value: ?(.*)", text)
    if wrong:
        return f"--{key[1]}: must be {TYPE_NAMES.get(wrong[1], wrong[1])}, got {wrong[2] or 'nothing'}"
    return f"--{key[1]}: {text[key.end() :]}"
