"""README commands and YAML files do what they say: each one is run, with two training steps.

The two set-up commands are not run again (they make an environment and run this very suite; ``.ci/run`` does that):
their files and extras must exist, what they run in the end is run here, and what the suite imports must be declared.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"^```[^\n]*\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
LINES = [line.removeprefix("$ ") for block in BLOCKS for line in block.splitlines()]
STARTS = ("python ", "python3 ", ".venv/bin/", "smoke ")
COMMANDS = list(dict.fromkeys(line.strip() for line in LINES if line.startswith(STARTS)))
"""Lines that begin with a program; the others are transcripts and trees."""
SETUP = [command for command in COMMANDS if "-m venv" in command]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _alone(command: str) -> str:
    """The part after the set-up, without the environment's folder."""
    return command.rpartition("&&")[2].strip().replace(".venv/bin/", "")


RUN_HERE = list(dict.fromkeys(_alone(command) for command in COMMANDS if "-m pytest" not in command))
YAML_FILES = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "configs").glob("*.yaml"))


def _arguments(command: str) -> list[str]:
    """The command for this interpreter, with absolute files, and with two steps where it would train longer."""
    program, *rest = shlex.split(command)
    assert program in ("python", "python3", "smoke"), command
    words = ["-m", "smoke", *rest] if program == "smoke" else rest
    trains = "train.py" in words or words[2:3] in (["run"], ["matrix"])
    if trains and "--steps" not in words and "--help" not in words:
        words += ["--steps", "2"]
    return [sys.executable, *(str(ROOT / word) if (ROOT / word).is_file() else word for word in words)]


def _run(command: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        _arguments(command), cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def _expect_success(command: str, folder: pathlib.Path) -> None:
    done = _run(command, folder)
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr


def test_the_readme_has_its_commands():
    assert len(SETUP) == 2
    assert "python train.py --precision mxfp8 --recompute mla_up_proj" in RUN_HERE
    assert {_alone(command) for command in SETUP} == {
        "python train.py --precision mxfp8 --recompute mla_up_proj",
        "python -m pytest",
    }
    assert len(RUN_HERE) >= 6


@pytest.mark.parametrize("command", RUN_HERE)
def test_every_command_of_the_readme_succeeds(command, tmp_path):
    _expect_success(command, tmp_path)
    folders = list((tmp_path / "runs").glob("*"))
    if "train.py" in command or "smoke run" in command:
        assert len(folders) == 1
        names = {"report.json", "report.html", "report.md", "report.xml", "steps.jsonl", "config.yaml"}
        assert {file.name for file in folders[0].iterdir()} == names
        assert len((folders[0] / "steps.jsonl").read_text(encoding="utf-8").splitlines()) == 2


@pytest.mark.parametrize("file", YAML_FILES)
def test_every_yaml_file_runs(file, tmp_path):
    _expect_success(f"python train.py --config {file}", tmp_path)


@pytest.mark.parametrize("command", SETUP, ids=_alone)
def test_setup_commands_name_what_exists(command):
    make, install, _ = (part.strip() for part in command.split("&&"))
    assert make == "python3 -m venv .venv"
    words = shlex.split(install)
    assert words[:2] == [".venv/bin/pip", "install"]
    assert (ROOT / words[words.index("-c") + 1]).is_file()
    asked = re.fullmatch(r"\.(?:\[([\w,]+)\])?", words[words.index("-e") + 1])
    assert asked
    assert set((asked[1] or "").split(",")) - {""} <= set(PROJECT["optional-dependencies"])


def _distribution(requirement: str) -> str:
    return re.split(r"[\[<>=;~! ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _imported(folder: str) -> set[str]:
    names: set[str] = set()
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    local = {"smoke"} | {file.stem for file in (ROOT / "tests").rglob("*.py")}
    return names - set(sys.stdlib_module_names) - local


@pytest.mark.parametrize(("folder", "extras"), [("smoke", []), ("tests", ["test"])])
def test_what_is_imported_is_declared(folder, extras):
    """Otherwise the second command of the README fails in a fresh environment. Optional packages have extras."""
    optional = ["te", "peers", "pytest"] if folder == "smoke" else []
    declared = [*PROJECT["dependencies"], *sum((PROJECT["optional-dependencies"][e] for e in [*extras, *optional]), [])]
    allowed = {_distribution(requirement) for requirement in declared}
    allowed |= {_distribution(needed) for needed in importlib.metadata.requires("datasets") or []}  # pyarrow
    providers = importlib.metadata.packages_distributions()
    providers = {**{"transformer_engine": ["transformer-engine"], "megatron": ["megatron-core"]}, **providers}
    missing = {}
    for name in _imported(folder):
        owners = {_distribution(owner) for owner in providers.get(name, [name])}
        if not owners & allowed:
            missing[name] = owners
    assert not missing


def test_constraints_pin_every_dependency():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {
        _distribution(line): line for line in pins.splitlines() if line.strip() and not line.startswith(("#", "-"))
    }
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]
    assert {_distribution(requirement) for requirement in wanted} <= set(pinned)
    assert all("==" in line for line in pinned.values())
