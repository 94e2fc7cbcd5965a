"""Command-line options and YAML files to configuration trees, by jsonargparse.

The tree of ``smoke.config`` is the only list of options: the docstring under a field is its help, its default the
default. A YAML file (``--config FILE``, relative to the working directory) holds what differs and is data, never code;
command-line options given after it override it. Every key is checked against the tree before jsonargparse sees the
file, because an unknown key whose value is an empty mapping would otherwise pass.

A mistake is a ``UsageError`` of one line that names the option.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from smoke.config import (
    PRECISIONS,
    REGIONS,
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
from smoke.precision.recipe import canonical

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
LISTS = ("--policy.keep_bf16", "--check.skip")
"""Options that hold several words, besides ``--recompute``."""
GROUPS = tuple(name for name in SECTIONS if "." not in name)


class UsageError(Exception):
    """The command line or a file it names is wrong; the message is one line."""


class WordError(argparse.ArgumentTypeError, ValueError):
    """A word is not legal. argparse prints the text of the one base, jsonargparse that of the other."""


def words(value: str | Sequence[Any]) -> tuple[str, ...]:
    """``a,b``, ``[a, b]`` or a list, as a tuple of words."""
    if isinstance(value, str):
        value = value.strip().removeprefix("[").removesuffix("]").split(",")
    items = [str(item).strip().strip("'\"") for item in value]
    return tuple(item for item in items if item)


def regions(value: str | Sequence[str]) -> tuple[str, ...]:
    """One recompute set; ``none`` is the empty one."""
    found = words(value)
    return () if found == ("none",) else found


def precision(value: str) -> str:
    """One precision, as its canonical word."""
    try:
        return canonical(str(value)).name
    except ValueError as error:
        raise WordError(str(error)) from None


def precisions(value: str | Sequence[str]) -> tuple[str, ...]:
    """A list of precisions, in canonical words."""
    found = tuple(precision(word) for word in words(value))
    if not found:
        raise WordError("name a precision")
    return found


def region_sets(value: str | Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    """Recompute sets separated by commas, with ``+`` inside a set: ``none,mla_up_proj+moe_act``."""
    sets = value.strip().removeprefix("[").removesuffix("]").split(",") if isinstance(value, str) else value or [()]
    return tuple(regions(one.replace("+", ",")) if isinstance(one, str) else regions(one) for one in sets)


@dataclasses.dataclass(frozen=True)
class Type:
    """A reader of words, with the name that ``--help`` prints."""

    read: Callable[[Any], Any]
    name: str

    def __call__(self, value: Any) -> Any:
        return self.read(value)

    def __str__(self) -> str:
        return self.name


PRECISION_HELP = (
    "bf16, fp8-delayed, fp8-tensorwise, fp8-blockwise, mxfp8 or nvfp4 (or Megatron's or Transformer Engine's name)"
)
REGIONS_HELP = f"none, or some of {', '.join(REGIONS)}"


def parse_run(args: Sequence[str], prog: str) -> RunConfig:
    """Arguments of ``run``. Raises UsageError; ``--help`` and ``--print_config`` print and raise SystemExit(0)."""
    parser = _parser(prog, "Train a few steps of a small DeepSeek-V3-shaped model, check them, and print a verdict.")
    parser.add_argument("--precision", type=Type(precision, "word"), default="mxfp8", help=f"{PRECISION_HELP}.")
    parser.add_argument(
        "--recompute", type=Type(regions, "words"), default=(), help=f"Regions to recompute: {REGIONS_HELP}."
    )
    return RunConfig(**_parse(parser, args))


def parse_matrix(args: Sequence[str], prog: str) -> list[RunConfig]:
    """Arguments of ``matrix``: one configuration for each precision and recompute set, precision by precision."""
    parser = _parser(prog, "Run every precision with every recompute set in one process, and print one table.")
    every = f"Precisions separated by commas, each {PRECISION_HELP}."
    parser.add_argument("--precision", type=Type(precisions, "words"), default=PRECISIONS, help=every)
    sets = f"Recompute sets separated by commas, with + inside a set; each {REGIONS_HELP}."
    parser.add_argument(
        "--recompute", type=Type(region_sets, "sets of words"), default=((), ("mla_up_proj",)), help=sets
    )
    values = _parse(parser, args)
    return [
        RunConfig(**{**values, "precision": precision, "recompute": regions})
        for precision in values["precision"]
        for regions in values["recompute"]
    ]


class _Parser(ArgumentParser):
    """Mistakes become UsageError."""

    def error(self, message: str, ex: Exception | None = None):
        raise UsageError(_one_line(message)) from ex


def _parser(prog: str, description: str) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    parser.usage = f"{prog} [options]"
    parser.add_argument("--config", action="config", help="YAML file with what differs from the defaults.")
    return parser


def _parse(parser: ArgumentParser, args: Sequence[str]) -> dict[str, Any]:
    parser.add_class_arguments(RunConfig, skip={"precision", "recompute"})
    for action in parser._actions:
        if action.dest in GROUPS:
            action.help = argparse.SUPPRESS
    _check_arguments(parser, args)
    for file in _config_files(args):
        _check_keys(_load(file), RunConfig, file)
    values = parser.instantiate(parser.parse_args(_lists_as_json(args)))
    return {f.name: values[f.name] for f in dataclasses.fields(RunConfig)}


def _lists_as_json(args: Sequence[str]) -> list[str]:
    """``a,b`` after an option that takes a list of words becomes ``["a", "b"]``, which jsonargparse reads."""
    found: list[str] = []
    for argument in args:
        option, equals, value = argument.partition("=")
        if found and found[-1] in LISTS and not argument.startswith("-"):
            found.append(json.dumps(words(argument)))
        elif option in LISTS and equals:
            found.append(f"{option}={json.dumps(words(value))}")
        else:
            found.append(argument)
    return found


def _check_arguments(parser: ArgumentParser, args: Sequence[str]) -> None:
    """Refuse unknown options here, with the nearest one, and a whole group given at once."""
    known = [option for action in parser._actions for option in action.option_strings]
    known += [f"--model.rope_scaling.{f.name}" for f in dataclasses.fields(RopeScaling)]
    for argument in args:
        option = argument.partition("=")[0]
        if not option.startswith("--") or option == "--":
            continue
        if option.removeprefix("--") in GROUPS:
            raise UsageError(f"{option}: name one of its options, as in {option}.NAME, or use --config FILE")
        if option not in known:
            raise UsageError(f"{option}: no such option; the nearest is {nearest(option, known)}")


def _config_files(args: Sequence[str]) -> Iterator[str]:
    for argument, following in zip(args, [*args[1:], ""], strict=False):
        if argument == "--config":
            yield following
        elif argument.startswith("--config="):
            yield argument.partition("=")[2]


def _load(file: str) -> Any:
    try:
        text = pathlib.Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--config {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {file}: is not UTF-8 text") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--config {file}: is not YAML: {' '.join(str(error).split())}") from None


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
        if group and not (value is None and key == "rope_scaling"):
            _check_keys(value, group, file, f"{path}{key}.")


TYPE_NAMES = {"int": "a whole number", "float": "a number", "bool": "true or false", "tuple": "a list of words"}


def _one_line(message: str) -> str:
    """jsonargparse's message as one line that begins with the option."""
    text = " ".join(message.split()).removeprefix("argument ")
    key = re.match(r'Parser key "([^"]+)": ', text)
    if not key:
        return text
    inner = re.search(r"--(\w+): (must be .*?, got .*?) - ", text)  # of a nested parser, which came through here before
    if inner:
        return f"--{key[1]}.{inner[1]}: {inner[2]}"
    wrong = re.search(r"Expected an? <class '(?:\w+\.)*(\w+)'>\. Got value: (.*)", text)
    if wrong:
        return f"--{key[1]}: must be {TYPE_NAMES.get(wrong[1], wrong[1])}, got {wrong[2]}"
    return f"--{key[1]}: {text[key.end() :]}"
