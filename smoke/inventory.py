"""``smoke env``: the machine, its published defects, and for each precision what would run on it. For bug reports."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smoke import __version__, defects
from smoke.config import PRECISIONS, RunConfig
from smoke.environment import PACKAGES, Environment
from smoke.plan import Refusal, native_blocker, resolve
from smoke.precision.recipe import RECIPES, Gate
from smoke.preflight import defect_table

RELEVANT_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "bf16", "asimd", "sve")
"""CPU flags that decide how products are computed."""


def print_environment(environment: Environment, console: Console | None = None) -> None:
    """Print four tables to the console (default: standard output)."""
    console = console or Console()
    console.print(_machine(environment))
    console.print(_packages(environment))
    console.print(defect_table("published defects of what is installed", defects.matches(environment)))
    console.print(_precisions(environment))


def _machine(environment: Environment) -> Table:
    table = Table(title="machine", show_header=False)
    flags = [flag for flag in RELEVANT_FLAGS if flag in environment.cpu_flags]
    bf16 = "has" if environment.cpu_has_bf16 else "no"
    table.add_row("smoke", __version__)
    table.add_row("python", environment.python)
    table.add_row("platform", environment.platform)
    table.add_row("cpu", f"{environment.cpu_name}, {environment.cpu_count} logical")
    table.add_row("cpu flags", f"{' '.join(flags) or 'unknown'} ({bf16} BF16 products)")
    table.add_row("memory", f"{environment.memory_bytes / 2**30:.1f} GiB")
    table.add_row("cuda", environment.cuda_version or "torch is built without CUDA")
    for index, device in enumerate(environment.devices):
        major, minor = device.capability
        memory = f"{device.memory_bytes / 2**30:.1f} GiB"
        table.add_row(f"cuda:{index}", f"{device.name}, compute capability {major}.{minor}, {memory}")
    if not environment.devices:
        table.add_row("cuda devices", "none")
    return table


def _packages(environment: Environment) -> Table:
    table = Table(title="packages", show_header=False)
    for package in PACKAGES:
        table.add_row(package, environment.packages.get(package, "not installed"))
    return table


def _precisions(environment: Environment) -> Table:
    table = Table(title="what --backend auto runs here")
    for heading in ("precision", "numbers", "device", "operations", "native on", "why not native here"):
        table.add_column(heading, overflow="fold")
    for precision in PRECISIONS:
        table.add_row(precision, *_row(precision, environment))
    return table


def _row(precision: str, environment: Environment) -> tuple[str, str, str, str, Text]:
    try:
        plan = resolve(RunConfig(precision=precision), environment)
    except Refusal as refusal:
        return refusal.verdict, "-", "-", "-", Text(refusal.message)
    gate = RECIPES[precision].gate
    if gate is None:
        return plan.numerics, plan.device, plan.impl, "any device", Text("nothing is quantized")
    blocker = native_blocker(precision, environment, plan.device)
    return plan.numerics, plan.device, plan.impl, _native_on(gate), Text(blocker)


def _native_on(gate: Gate) -> str:
    least, below = gate.min_capability, gate.below_capability
    upper = f" and below {below[0]}.{below[1]}" if below else ""
    return f"compute capability {least[0]}.{least[1]} or higher{upper}; {gate.libraries}"
