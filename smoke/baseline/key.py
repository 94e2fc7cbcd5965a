"""The key of a baseline: what has to be the same before two runs can be compared bit by bit.

Losses are bit-equal on one toolchain and device only. Another torch sums in another order; another Python minor ships
other prose (``pydoc_data``); a CPU with wider registers, or another number of threads, splits a sum elsewhere. So each
of these is part of the key, and so are hashes of the configuration and of the batches. What changes no loss (folder,
progress bar, which checks run) is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from smoke import __version__
from smoke.config import RunConfig
from smoke.environment import Environment
from smoke.plan import Plan
from smoke.record import plain

FIELDS = ("torch", "triton", "python", "smoke", "device", "features", "threads", "config", "data")
"""Every field of a key, in the order of the file."""
HASHES = ("config", "data")
UNRELATED = (
    *("out", "resume", "baseline", "require_baseline", "check"),
    *("trainer.checkpoint_every", "trainer.progress_bar"),
)
"""Options that change no loss: a resumed run repeats one that was not interrupted, and holds all its steps."""
RESOLVED = ("backend", "impl", "device")
"""Options that may say ``auto``; the key takes what the plan made of them."""
CPU_FEATURES = (
    *("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_ne_convert"),
    *("amx_tile", "amx_bf16", "asimd", "bf16", "i8mm", "sve", "sve2", "svebf16"),
)
"""CPU flags by which torch and its libraries choose kernels."""


def key_of(plan: Plan, environment: Environment, *, data_sha256: str, threads: int) -> dict[str, str]:
    """The key of a run.

    Args:
        plan: the resolved run.
        environment: the machine.
        data_sha256: of all its batches, in order.
        threads: CPU threads of one operation; they count on a CPU only.
    """
    cuda = plan.device.startswith("cuda")
    device = environment.devices[0] if cuda else None
    features = " ".join(flag for flag in CPU_FEATURES if flag in environment.cpu_flags)
    values = {
        "torch": environment.packages.get("torch", ""),
        "triton": environment.packages.get("triton", "") if plan.impl == "triton" else "",
        "python": ".".join(environment.python.split(".")[:2]),
        "smoke": __version__,
        "device": device.name if device else environment.cpu_name,
        "features": "sm_{}{}".format(*device.capability) if device else features,
        "threads": "" if cuda else str(threads),
        "config": config_sha256(plan),
        "data": data_sha256,
    }
    return {name: values[name] for name in FIELDS}


def config_sha256(plan: Plan) -> str:
    """Hash of every option that can change a loss, defaults included, with what ``auto`` became."""
    options = {k: v for k, v in flat(plain(plan.config)).items() if not _named(k, (*UNRELATED, *RESOLVED))}
    options |= {"backend": plan.backend, "impl": plan.impl, "device": plan.device, "numerics": plan.numerics}
    return sha256([json.dumps(options, sort_keys=True)])


def sha256(texts: Iterable[str]) -> str:
    """Hash of several texts, one a line."""
    return hashlib.sha256("\n".join(texts).encode("utf-8", "backslashreplace")).hexdigest()


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of options as one mapping with dotted names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def options_of(config: Mapping[str, Any]) -> dict[str, str]:
    """What a person reads beside the key: precision and recompute, and every related option that is no default."""
    default = flat(plain(RunConfig()))
    always = ("precision", "recompute", "layout", "steps")
    return {
        name: json.dumps(value)
        for name, value in flat(config).items()
        if not _named(name, UNRELATED) and (name in always or value != default.get(name, ...))
    }


def _named(option: str, names: Iterable[str]) -> bool:
    return any(option == name or option.startswith(f"{name}.") for name in names)
