"""What is here: facts about this machine, in one frozen value. No decision is made in this file.

``detect`` reads package versions from their metadata (nothing is imported for that) and asks torch, imported only then,
about devices. What only Transformer Engine can answer is put in by the caller (``transformer_engine`` below).
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

PACKAGES = (
    "torch",
    "triton",
    "lightning",
    "torchmetrics",
    "datasets",
    "jsonargparse",
    "rich",
    "plotly",
    "junitparser",
    "transformer-engine",
    "megatron-core",
    "torchao",
)
"""Distributions whose versions are part of every report."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One CUDA device."""

    name: str
    capability: tuple[int, int]
    """Compute capability, major and minor."""
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One machine, as seen by one process."""

    python: str
    platform: str
    cpu_name: str
    cpu_flags: tuple[str, ...]
    cpu_count: int
    """Logical CPUs this process may use."""
    memory_bytes: int
    """Memory this process may use: the machine's, or its control group's limit; 0 where it cannot be read."""
    packages: Mapping[str, str]
    """Version of each of ``PACKAGES`` that is installed."""
    cuda_version: str = ""
    """CUDA toolkit torch was built with; empty for a CPU build."""
    devices: tuple[Device, ...] = ()
    """CUDA devices torch can use, in torch's order."""
    transformer_engine: Mapping[str, str] = field(default_factory=dict)
    """For each recipe that Transformer Engine was asked about: why it cannot run here, or nothing where it can."""

    @property
    def cuda_available(self) -> bool:
        """Whether torch can use a CUDA device."""
        return bool(self.devices)

    @property
    def cpu_has_bf16(self) -> bool:
        """Whether the CPU multiplies BF16 matrices in hardware."""
        return has_bf16(self.cpu_flags)

    def missing(self, package: str) -> str:
        """Why a package of ``PACKAGES`` cannot be used; empty when it is installed."""
        return "" if package in self.packages else f"the package {package} is not installed"


def detect() -> Environment:
    """Look at this machine. Imports torch (about two seconds in a fresh process), allocates nothing on a device."""
    import torch

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            Device(
                name=properties.name,
                capability=(properties.major, properties.minor),
                memory_bytes=properties.total_memory,
            )
        )
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_name=cpu_name(),
        cpu_flags=cpu_flags(),
        cpu_count=_cpu_count(),
        memory_bytes=_memory_bytes(),
        packages=_versions() | {"torch": torch.__version__},
        cuda_version=torch.version.cuda or "",
        devices=tuple(devices),
    )


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo (empty where there is none)."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_flags() -> tuple[str, ...]:
    """Instruction-set flags of the CPU as the kernel lists them (empty where there is no /proc/cpuinfo)."""
    info = _cpuinfo()
    return tuple(sorted(info.get("flags", info.get("Features", "")).split()))


def cpu_name() -> str:
    """The CPU's model name."""
    return _cpuinfo().get("model name", "") or platform.processor() or platform.machine()


def has_bf16(flags: tuple[str, ...]) -> bool:
    """Whether these CPU flags mean BF16 matrix products in hardware (AVX512-BF16, AMX-BF16, or Arm BF16)."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether this machine's CPU multiplies BF16 matrices in hardware."""
    return has_bf16(cpu_flags())


def _cpu_count() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _memory_bytes() -> int:
    limits = []
    if {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(getattr(os, "sysconf_names", {})):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = pathlib.Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        limit = "max"
    if limit.isdigit():
        limits.append(int(limit))
    return min(limits, default=0)


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
