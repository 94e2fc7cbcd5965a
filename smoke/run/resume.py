"""``--resume``: which checkpoint, and whether it is of the run that is asked for.

A checkpoint is read as data (``weights_only``): a file from elsewhere can hold wrong numbers and run nothing. What
decides the numbers of a run has to be what it was; how many steps, where to write and what to check may change.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from smoke.callbacks.checkpoints import SUFFIX
from smoke.config import RunConfig
from smoke.plan import USAGE, Refusal
from smoke.record import plain
from smoke.run.foreign import load_plain

FOLDER = "checkpoints"
SAME = ("precision", "recompute", "layout", "seed", "model", "data", "train", "policy")
SAME_TRAINER = ("accumulate_grad_batches", "gradient_clip_val")


def notes(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint says of its run: the options that a resumed run must share, by flag."""
    return {"options": _flat(config)}


def checkpoint_to_resume(config: RunConfig) -> pathlib.Path | None:
    """The checkpoint that ``--resume`` names, None without the option. Raises Refusal in one line."""
    if config.resume is None:
        return None
    path = find(config.resume)
    step, options = _read(path)
    for flag, value in _flat(config).items():
        if options.get(flag) != value:
            raise _refusal(config.resume, f"its run had --{flag} {options.get(flag)}, this one has {value}")
    if step >= config.steps:
        raise _refusal(config.resume, f"holds {step} steps already; ask for more than --steps {config.steps}")
    return path


def find(resume: str) -> pathlib.Path:
    """The file itself, or the newest checkpoint of a run folder. Raises Refusal."""
    path = pathlib.Path(resume)
    if path.is_file():
        return path
    found = sorted(path.glob(f"{FOLDER}/*{SUFFIX}"))
    if not found:
        problem = f"holds no {FOLDER}/*{SUFFIX}" if path.is_dir() else "does not exist"
        raise _refusal(resume, f"{problem}; name a run folder of --trainer.checkpoint_every, or one of its files")
    return found[-1]


def _read(path: pathlib.Path) -> tuple[int, Mapping[str, Any]]:
    """Finished steps of a checkpoint, and its run's options."""
    try:
        loaded = load_plain(path)
        return int(loaded["global_step"]), dict(loaded["smoke"]["options"])
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:  # ForeignError is a ValueError
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        raise _refusal(str(path), f"is no checkpoint of this program ({reason})") from None


def _flat(config: RunConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in SAME:
        found |= dict(_leaves(name, plain(getattr(config, name))))
    return found | {f"trainer.{name}": getattr(config.trainer, name) for name in SAME_TRAINER}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    else:
        yield path, value


def _refusal(resume: str, problem: str) -> Refusal:
    return Refusal(USAGE, f"--resume {resume}: {problem}")
