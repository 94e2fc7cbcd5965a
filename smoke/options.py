"""Command-line options and YAML files to configuration trees, by jsonargparse.

The tree of ``smoke.config`` is the only list of options: the docstring under a field is its help, its default the
default. A YAML file (``--config FILE``, see ``smoke.config_file``) holds what differs; options given after it on the
command line override it.

A mistake is a ``UsageError`` of one line that names the option.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentParser, set_parsing_settings

from smoke.config import DEVICES, PRECISIONS, REGIONS, RopeScaling, RunConfig, nearest
from smoke.config_file import SECTIONS, UsageError, check_files, one_line
from smoke.precision.recipe import canonical

FLAGS = {"--require-baseline": "--require_baseline=true"}
"""Options without a value."""
LISTS = ("--policy.keep_bf16", "--check.skip")
"""Options that hold several words, besides ``--recompute``."""
GROUPS = tuple(name for name in SECTIONS if "." not in name)


class WordError(argparse.ArgumentTypeError, ValueError):
    """A word is not legal. argparse prints the text of the one base, jsonargparse that of the other."""


def _items(value: Any) -> Sequence[Any]:
    """The items of ``a,b``, of ``[a, b]`` or of a list. Raises WordError for anything else."""
    if isinstance(value, str):
        text = value.strip()
        return (text[1:-1] if text.startswith("[") and text.endswith("]") else text).split(",")
    if not isinstance(value, (list, tuple)):
        raise WordError(f"must be a list of words, got {value}")
    return value


def words(value: Any) -> tuple[str, ...]:
    """``a,b``, ``[a, b]`` or a list, as a tuple of words."""
    items = [str(item).strip().strip("'\"") for item in _items(value)]
    return tuple(item for item in items if item)


def regions(value: Any) -> tuple[str, ...]:
    """One recompute set; ``none`` is the empty one."""
    found = words(value)
    return () if found == ("none",) else found


def precision(value: Any) -> str:
    """One precision, as its canonical word."""
    if isinstance(value, (list, tuple, dict)):
        raise WordError(f"must be one word, got {value}")
    try:
        return canonical(str(value)).name
    except ValueError as error:
        raise WordError(str(error)) from None


def precisions(value: Any) -> tuple[str, ...]:
    """A list of precisions, in canonical words."""
    found = tuple(precision(word) for word in words(value))
    if not found:
        raise WordError("name a precision")
    return found


def region_sets(value: Any) -> tuple[tuple[str, ...], ...]:
    """Recompute sets separated by commas, with ``+`` inside a set: ``none,mla_up_proj+moe_act``."""
    sets = _items(value) or [()]
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
    return RunConfig(**_parse(parser, [*_options_of_resumed(args), *args]))


def _options_of_resumed(args: Sequence[str]) -> list[str]:
    """``--config`` with the file of the run that ``--resume`` names, if it is there; what is typed overrides it."""
    named = [following for argument, following in zip(args, args[1:], strict=False) if argument == "--resume"]
    named += [argument.partition("=")[2] for argument in args if argument.startswith("--resume=")]
    if not named:
        return []
    path = pathlib.Path(named[-1])
    file = (path if path.is_dir() else path.parent.parent) / "config.yaml"
    return ["--config", str(file)] if file.is_file() else []


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
    if values["resume"] is not None:
        raise UsageError(f"--resume {values['resume']}: goes on with one run; use it with run, not with matrix")
    if len(set(values["precision"])) < len(values["precision"]):
        raise UsageError(f"--precision {','.join(values['precision'])}: name each one once")
    if len({frozenset(one) for one in values["recompute"]}) < len(values["recompute"]):
        sets = ",".join("+".join(one) or "none" for one in values["recompute"])
        raise UsageError(f"--recompute {sets}: name each set once")
    return [
        RunConfig(**{**values, "precision": precision, "recompute": regions})
        for precision in values["precision"]
        for regions in values["recompute"]
    ]


@dataclasses.dataclass(frozen=True)
class BaselineOptions:
    """Arguments of ``baseline update``, ``show`` and ``diff``."""

    folders: tuple[str, ...]
    baseline: str
    reason: str


def parse_baseline(action: str, args: Sequence[str], prog: str) -> BaselineOptions:
    """Arguments of one of the three. Raises UsageError."""
    parser = _bare_parser(prog, BASELINE_ACTIONS[action])
    if action != "show":
        parser.usage = f"{prog} RUN_FOLDER{'...' if action == 'update' else ''} [options]"
        parser.add_argument(
            "folders", nargs="+" if action == "update" else 1, type=str, help="Folder of a finished run."
        )
    parser.add_argument("--baseline", type=str, default="baseline.json", help="The file of recorded runs.")
    if action == "update":
        parser.add_argument(
            "--reason", type=str, default="", help="Why these numbers are right; it goes into the file."
        )
    _check_arguments(parser, args)
    values = parser.parse_args(args)
    return BaselineOptions(tuple(values.get("folders") or ()), values.baseline, values.get("reason") or "")


BASELINE_ACTIONS = {
    "update": "Record finished runs whose checks are all green: exact losses, and costs with their spread.",
    "show": "Print what is recorded.",
    "diff": "Compare a finished run with what is recorded, step by step.",
}


@dataclasses.dataclass(frozen=True)
class SelftestOptions:
    """Arguments of ``selftest``."""

    only: tuple[str, ...]
    """Names of faults; empty for all."""
    out: str | None
    device: str


def parse_selftest(args: Sequence[str], prog: str) -> SelftestOptions:
    """Arguments of ``selftest``. Raises UsageError."""
    from smoke.faults import FAULTS

    parser = _bare_parser(prog, "Inject every known fault into a run of seconds; the right checks must turn red.")
    names = f"Names of faults separated by commas, of {', '.join(fault.name for fault in FAULTS)}."
    parser.add_argument("--only", type=Type(words, "words"), default=(), help=names)
    parser.add_argument("--out", type=str, default=None, help="Folder of selftest.json; default runs/<UTC>-selftest.")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="Where the runs train.")
    _check_arguments(parser, args)
    values = parser.parse_args(args)
    return SelftestOptions(tuple(dict.fromkeys(values.only)), values.out, values.device)


class _Parser(ArgumentParser):
    """Mistakes become UsageError."""

    def error(self, message: str, ex: Exception | None = None):
        raise UsageError(one_line(message)) from ex


def _bare_parser(prog: str, description: str) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    parser.usage = f"{prog} [options]"
    return parser


def _parser(prog: str, description: str) -> ArgumentParser:
    parser = _bare_parser(prog, description)
    parser.add_argument("--config", action="config", help="YAML file with what differs from the defaults.")
    return parser


def _parse(parser: ArgumentParser, args: Sequence[str]) -> dict[str, Any]:
    parser.add_class_arguments(RunConfig, skip={"precision", "recompute"})
    for action in parser._actions:
        if action.dest in GROUPS:
            action.help = argparse.SUPPRESS
    args = [FLAGS.get(argument, argument) for argument in args]
    _check_arguments(parser, args)
    try:
        os.getcwd()
    except OSError:
        raise UsageError("the working directory does not exist any more; change to one that does") from None
    check_files(args)
    try:
        values = parser.instantiate(parser.parse_args(_lists_as_json(args)))
    except OverflowError:  # from jsonargparse, which then does not say where
        raise UsageError(f"a number has too many digits: the largest is {sys.float_info.max:.1e}") from None
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
