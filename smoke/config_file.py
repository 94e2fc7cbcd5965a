"""YAML files of options (``--config FILE``): read as data, never as code, and every key held against the tree.

A YAML file, relative to the working directory, holds what differs from the defaults. Its keys and nulls are checked
here, before jsonargparse sees the file: it would pass an unknown key whose value is an empty mapping, a null where
none is legal, and of a key that stands twice the last.

A mistake is a ``UsageError`` of one line that names the file and the key.
"""

from __future__ import annotations

import dataclasses
import pathlib
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


class UsageError(Exception):
    """The command line or a file it names is wrong; the message is one line."""


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
    if not file:
        raise UsageError("--config: name a file")
    try:
        text = pathlib.Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--config {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {file}: is not UTF-8 text") from None
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise UsageError(f"--config {file}: is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UsageError(f"--config {file}: is not YAML of options: nested too deeply") from None


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
