"""Whatever stands on the command line or in a YAML file: options, or one line that says what is wrong with them.

The examples are the same in every run, so that a red build is about a change, and few, because building the parser
takes a tenth of a second. To search wider: ``derandomize=False`` and a larger ``max_examples`` in ``FEW``.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from smoke.config import PRECISIONS, REGIONS, RunConfig
from smoke.config_file import SECTIONS
from smoke.environment import Environment
from smoke.options import UsageError, parse_matrix, parse_run
from smoke.plan import Plan, Refusal, resolve
from smoke.preflight import examine

FEW = settings(
    derandomize=True,
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
HERE = Environment(
    python="3.11", platform="", cpu_name="", cpu_flags=(), cpu_count=1, memory_bytes=2**35, packages={"torch": "2.13"}
)


def options(owner: type = RunConfig, prefix: str = "") -> list[str]:
    """Every option of the tree, without its two dashes."""
    found = []
    for field in dataclasses.fields(owner):
        group = SECTIONS.get(f"{prefix}{field.name}")
        found += options(group, f"{prefix}{field.name}.") if group else [f"{prefix}{field.name}"]
    return found


OPTIONS = [option for option in options() if option != "out"]
WORDS = [*PRECISIONS, *REGIONS, "none", "auto", "cpu", "cuda", "thd", "emulated", "te", "null", "true", "e4m3", "e5m2"]
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, 1e308, 1e-320]))
HOSTILE = [
    "",
    " ",
    "-",
    "--",
    "=",
    "[",
    "]",
    "{",
    "{}",
    "[]",
    "a,b",
    "[a, b]",
    "~",
    "&a",
    "*a",
    "!!python/object/apply:os.getcwd []",
    "!!binary aGk=",
    "<<: {}",
    "{a: {b: {c: 1}}}",
    "\x00",
    "\x1b[31m",
    "\udcff",
    "\u202e",
    "0x10",
    "1_000",
    "1e3",
    "2026-99-99",
    "%s%n",
    "{0.__class__}",
    "${HOME}",
    "text:/dev/zero",
    "jsonl:",
    "-1",
    "nan",
    "inf",
]
VALUES = st.one_of(st.sampled_from([*WORDS, *HOSTILE]), NUMBERS.map(str), st.text(max_size=20))
ARGUMENTS = st.one_of(
    st.tuples(st.sampled_from(OPTIONS), VALUES).map(lambda pair: [f"--{pair[0]}", pair[1]]),
    st.tuples(st.sampled_from(OPTIONS), VALUES).map(lambda pair: [f"--{pair[0]}={pair[1]}"]),
    st.sampled_from(HOSTILE).map(lambda word: [word]),
    st.text(max_size=10).map(lambda word: [f"--{word}"]),
)


def outcome(parse: Callable[..., Any], args: list[str]) -> Any:
    """What a parser gives, or the line of its refusal."""
    try:
        return parse(args, "smoke run")
    except UsageError as error:
        line = str(error)
    assert "\n" not in line
    assert line.strip()
    return line


@FEW
@given(st.lists(ARGUMENTS, max_size=4).map(lambda groups: sum(groups, [])))
@example(["--seed", "9" * 5000])
@example(["--policy.keep_bf16", "[" * 3000])
@example(["--\n"])
@example(["--seed", "1\n2"])
def test_any_command_line_is_options_or_one_line(args):
    if {"--help", "-h", "--print_config"} & {argument.partition("=")[0] for argument in args}:
        return
    assert isinstance(outcome(parse_run, args), RunConfig | str)


@settings(FEW, max_examples=3)
@given(st.lists(st.tuples(st.sampled_from(["--precision", "--recompute"]), VALUES), max_size=3))
def test_any_lists_of_a_matrix_are_rows_or_one_line(pairs):
    assert isinstance(outcome(parse_matrix, [word for pair in pairs for word in pair]), list | str)


LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from([*WORDS, *HOSTILE]), st.text(max_size=8))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*OPTIONS, *SECTIONS, "hidden_size", "factor", "x"]), inner, max_size=3),
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("fuzz") / "options.yaml"


@FEW
@given(TREES)
def test_any_tree_in_a_file_is_options_or_one_line(file, tree):
    file.write_bytes(yaml.safe_dump(tree, allow_unicode=False).encode("utf-8", "backslashreplace"))
    assert isinstance(outcome(parse_run, ["--config", str(file)]), RunConfig | str)


@FEW
@given(st.one_of(st.binary(max_size=60), st.text(alphabet="{}[]:,&*!-? \n\t#|>'\"a1~<", max_size=60).map(str.encode)))
@example(b"steps: 2026-99-99")
@example(b"? [a]\n: b")
@example(b"\xff\xfe\x00")
@example(b"&a [*a]")
def test_any_bytes_in_a_file_are_options_or_one_line(file, content):
    file.write_bytes(content)
    assert isinstance(outcome(parse_run, ["--config", str(file)]), RunConfig | str)


def _changed(config: Any, path: str, value: object) -> Any:
    group, _, leaf = path.rpartition(".")
    if not group:
        return dataclasses.replace(config, **{leaf: value})
    inner = operator.attrgetter(group)(config)
    return config if inner is None else _changed(config, group, dataclasses.replace(inner, **{leaf: value}))


NUMERIC = [option for option in OPTIONS if type(operator.attrgetter(option)(RunConfig())) in (int, float)]
SIZES = st.one_of(st.integers(-2, 300), st.sampled_from([2**20, 2**40, 2**41, 10**30]))


@settings(FEW, max_examples=40)
@given(st.sampled_from(PRECISIONS), st.sets(st.sampled_from(REGIONS)), st.dictionaries(st.sampled_from(NUMERIC), SIZES))
def test_any_numbers_are_a_plan_or_a_refusal_of_one_line(precision, regions, numbers):
    """Whole numbers also where a fraction is meant: the rules must hold before anything is computed from them."""
    config = RunConfig(precision=precision, recompute=tuple(sorted(regions)))
    for path, value in numbers.items():
        config = _changed(config, path, value)
    refusal = None
    try:
        assert isinstance(resolve(config, HERE), Plan)
    except Refusal as refused:
        refusal = refused
    code = refusal.exit_code if refusal else 0
    assert code in (0, 2, 4)
    assert "\n" not in (refusal.message if refusal else "")
    assert examine(config, HERE).exit_code == code


def test_no_file_is_run_as_code(tmp_path):
    mark = tmp_path / "mark"
    for tag in ("python/object/apply:os.mkdir", "python/object/new:os.mkdir", "python/name:os.mkdir"):
        file = tmp_path / "options.yaml"
        file.write_text(f"out: !!{tag} ['{mark}']\n", encoding="utf-8")
        assert "is not YAML" in outcome(parse_run, ["--config", str(file)])
        assert not isinstance(outcome(parse_run, [f"--model.rope_scaling=!!{tag} ['{mark}']"]), RunConfig)
        outcome(parse_run, [f"--out=!!{tag} ['{mark}']"])
    assert not mark.exists()


@pytest.mark.parametrize("depth", [9, 30])
def test_aliases_that_stand_for_billions_are_refused_at_once(tmp_path, depth):
    lines = ["recompute:", "  - &x0 [mlp, mlp]"]
    lines += [f"  - &x{i} [*x{i - 1}, *x{i - 1}, *x{i - 1}, *x{i - 1}]" for i in range(1, depth)]
    file = tmp_path / "options.yaml"
    file.write_text("\n".join(lines), encoding="utf-8")
    assert "stands for more than 10,000 values" in outcome(parse_run, ["--config", str(file)])


def test_what_is_no_regular_file_is_not_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for name in (str(pipe), "/dev/zero"):
        assert "is a device, a pipe or a socket" in outcome(parse_run, ["--config", name])
    assert "is a directory" in outcome(parse_run, ["--config", str(tmp_path)])
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (1 << 21))
    assert "more than 1,048,576 bytes" in outcome(parse_run, [f"--config={large}"])
    assert "--config a\\x00b" in outcome(parse_run, ["--config", "a\x00b"])
