"""The shape of the package: who may import whom, what a fresh import costs, how long files and functions are."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "smoke"
FILES = sorted(PACKAGE.rglob("*.py"))

LEVELS = (
    ("config", "environment", "numerics", "output", "process", "record"),
    ("kernels",),
    ("data", "model"),
    ("precision", "interop", "callbacks", "trajectories", "probes", "module", "shapes", "rules", "defects"),
    ("requirements",),
    ("plan",),
    ("checks",),
    ("report", "verdict"),
    ("baseline",),
    ("faults",),
    ("run",),
    ("bench",),
    ("config_file",),
    ("preflight",),
    ("options", "inventory", "explain"),
    ("cli",),
    ("__main__", "pytest_plugin"),
)
"""Rooms from left to right. A room imports rooms of levels to its left only."""
LEVEL = {room: index for index, level in enumerate(LEVELS) for room in level}


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _module(file: pathlib.Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(file: pathlib.Path) -> list[tuple[str, int]]:
    """Every module imported anywhere in the file, lazy imports included, with its line."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
            found += [(name if base in ("smoke", *_PACKAGES) else base, node.lineno) for name in names]
        elif isinstance(node, ast.Call) and _is_import_module(node):
            found.append((node.args[0].value, node.lineno))  # type: ignore[attr-defined]
    return found


def _is_import_module(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__") and bool(node.args) and isinstance(node.args[0], ast.Constant)


_PACKAGES = {_module(file) for file in FILES if file.name == "__init__.py"}
ALL_IMPORTS = [(file, module, line) for file in FILES for module, line in _imports(file)]


def test_every_room_has_a_level():
    rooms = {_room(_module(file)) for file in FILES} - {""}
    assert rooms <= set(LEVEL), f"rooms without a level: {rooms - set(LEVEL)}"


def test_rooms_import_only_to_their_left():
    wrong = []
    for file, module, line in ALL_IMPORTS:
        here, there = _room(_module(file)), _room(module)
        if module.split(".")[0] != "smoke" or there in ("", "__version__", here) or here == "":
            continue
        if there not in LEVEL or LEVEL[there] >= LEVEL[here]:
            wrong.append(f"{file.relative_to(ROOT)}:{line}: {here} imports {there}")
    assert not wrong, "\n".join(wrong)


def test_the_package_itself_imports_nothing():
    assert _imports(PACKAGE / "__init__.py") == []


def test_kernel_implementations_never_import_each_other():
    wrong = []
    for file, module, line in ALL_IMPORTS:
        here, there = _module(file).split("."), module.split(".")
        if here[:2] != ["smoke", "kernels"] or there[:2] != ["smoke", "kernels"] or min(len(here), len(there)) < 4:
            continue
        if there[2] != here[2] and there[3] == "triton":
            wrong.append(f"{file.relative_to(ROOT)}:{line}: {here[2]} imports {module}")
        if {here[-1], there[3]} == {"reference", "triton"}:
            wrong.append(f"{file.relative_to(ROOT)}:{line}: {here[-1]} imports {there[3]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("transformer_engine", ["smoke/precision/te.py"]),
        ("megatron", ["smoke/interop/megatron.py"]),
        ("torchao", ["smoke/bench/linear.py"]),
        ("transformers", []),
        ("gfloat", []),
        ("jsonargparse", ["smoke/options.py"]),
    ],
)
def test_packages_that_only_some_files_may_import(package, allowed):
    users = {str(file.relative_to(ROOT)) for file, module, _ in ALL_IMPORTS if module.split(".")[0] == package}
    assert users <= set(allowed)


def test_nobody_imports_torchs_test_internals():
    files = [*FILES, *sorted((ROOT / "tests").rglob("*.py")), ROOT / "train.py"]
    users = [
        str(file) for file in files for module, _ in _imports(file) if module.startswith("torch.testing._internal")
    ]
    assert users == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_and_functions_stay_small(file):
    text = file.read_text(encoding="utf-8")
    longest = 400 if file.name.startswith("triton") else 300
    assert len(text.splitlines()) <= longest
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_kernel(node):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 80, f"{node.name} has {length} lines"


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_modules_begin_with_a_docstring(file):
    text = file.read_text(encoding="utf-8")
    assert not text or ast.get_docstring(ast.parse(text))


HEAVY = """
import sys
{code}
heavy = [m for m in ("torch", "lightning", "transformers", "datasets", "pandas", "plotly") if m in sys.modules]
sys.exit(f"loaded {{heavy}}" if heavy else 0)
"""


@pytest.mark.parametrize(
    "code",
    [
        "import smoke, smoke.record, smoke.environment, smoke.plan, smoke.checks, smoke.precision.recipe",
        "import smoke.cli; smoke.cli.main(['run', '--help'])",
        "import smoke.cli; smoke.cli.main(['--help']); smoke.cli.main(['matrix', '--help'])",
        "import smoke.cli; smoke.cli.main(['run', '--precision', 'fp9'])",
    ],
    ids=["imports", "run help", "help", "mistyped option"],
)
def test_a_fresh_process_loads_nothing_heavy(code):
    done = subprocess.run(
        [sys.executable, "-c", HEAVY.format(code=code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
