"""config.yaml: the run's options as ``--config`` loads them again.

Like every YAML file of the project it holds deltas over the defaults, and always the words that name the run, so that
a look at it tells which run it was. The folder is left out: a rerun gets its own. The whole tree, defaults included, is
in report.json.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from smoke.config import RunConfig
from smoke.record import plain

ALWAYS = ("precision", "recompute", "layout", "steps", "seed")
NEVER = ("out", "resume")


def deltas(config: RunConfig) -> dict[str, Any]:
    """Plain mappings, lists and scalars of what differs from the defaults."""
    flat = {name: plain(getattr(config, name)) for name in ALWAYS}
    return flat | {k: v for k, v in _differences(config, RunConfig()).items() if k not in (*ALWAYS, *NEVER)}


def _differences(value: Any, default: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        mine, other = getattr(value, field.name), getattr(default, field.name)
        if mine == other:
            continue
        nested = dataclasses.is_dataclass(mine) and dataclasses.is_dataclass(other)
        found[field.name] = _differences(mine, other) if nested else plain(mine)
    return found


def config_text(config: RunConfig) -> str:
    """The deltas as YAML."""
    return "# Options of this run: python train.py --config config.yaml repeats it.\n" + text_of(deltas(config))


def text_of(values: dict[str, Any]) -> str:
    """Plain values as YAML."""
    import yaml

    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120)
