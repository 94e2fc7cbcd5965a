"""The bundle of a red run: everything that reproduces its failures alone, in a process or on a machine of its own.

    bundle.json    which checks were red, at which step and place; seed, fault, versions, and the command to type
    config.yaml    every option, in the form that ``--config`` reads
    tensors.pt     weights, buffers and batches of the start, and the tensors that departed, on both sides

The state is that of the run's start, not of the red step: what goes wrong through an earlier step (a stale scale, a
counter) is then part of what is reproduced. The batches are stored, so a bundle needs no data file. They are the user's
data: look before you send one.

A bundle may come from anybody. The options are parsed like a user's own, the tensors are loaded with ``weights_only``
(no code), both are held against their SHA-256 and the sizes that the options imply, and whatever is wrong is a
``BundleError`` of one line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smoke import __version__
from smoke.checks import ERROR, FAIL, Finding
from smoke.config import RunConfig
from smoke.record import plain
from smoke.report import write_atomic
from smoke.report.config_yaml import text_of
from smoke.report.folder import BUNDLE
from smoke.requirements import CHECKS

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
"""Raised by a change that older readers would misread."""
FACTS, OPTIONS, TENSORS = "bundle.json", "config.yaml", "tensors.pt"
MOST_BYTES = 1 << 20
"""Largest bundle.json that is read."""


class BundleError(Exception):
    """A folder is no bundle that this version can replay; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One red check."""

    check: str
    status: str
    step: int | None
    where: str
    measured: str
    detail: str
    departures: tuple[Mapping[str, Any], ...] = ()
    """First departure of each pass, as ``smoke.probes.Departure`` has it; none where the check is no parity."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What bundle.json says."""

    format: int = FORMAT
    smoke: str = __version__
    command: str
    """What to type to reproduce it."""
    seed: int
    fault: str
    """Name of the fault that was injected; empty without one."""
    source: str
    """``--data.source`` of the run; its batches are stored."""
    packages: Mapping[str, str]
    sha256: Mapping[str, str]
    """Of the two other files."""
    failures: tuple[Failure, ...]


@dataclass
class Start:
    """Where a run began. Tensors are on the CPU."""

    state: dict[str, Tensor]
    """Parameters and buffers of the module, by name."""
    batches: list[dict[str, Tensor]] | None
    """None where they are made again from the seed."""
    observed: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """``CHECK.PASS.left``, ``.right`` and ``.input N``: the tensors of each departure. Nothing reads them back."""


def bundle_config(config: RunConfig, *, device: str, impl: str) -> RunConfig:
    """The options of a bundle: device and operations as decided, no folder, and no file that has to be found again.

    A resumed run is repeated from its start, which is the same run as long as resuming is exact.
    """
    source = "generated" if ":" in config.data.source else config.data.source
    return dataclasses.replace(
        config,
        device=device,
        impl=impl,
        out=None,
        resume=None,
        data=dataclasses.replace(config.data, source=source),
        trainer=dataclasses.replace(config.trainer, checkpoint_every=None),
    )


def write(folder: pathlib.Path, facts: Mapping[str, Any], config: RunConfig, start: Start) -> Bundle:
    """Make ``folder`` and write the three files, bundle.json last. ``facts`` are fields of ``Bundle``. OSError."""
    import torch

    folder.mkdir()
    options = text_of(plain(config))
    write_atomic(folder / OPTIONS, options)
    buffer = io.BytesIO()  # a full disk is then an OSError like any other
    torch.save({"state": start.state, "batches": start.batches, "observed": start.observed}, buffer)
    (folder / TENSORS).write_bytes(buffer.getbuffer())
    digests = {OPTIONS: hashlib.sha256(options.encode()).hexdigest(), TENSORS: _sha256(folder / TENSORS)}
    bundle = Bundle(seed=config.seed, sha256=digests, **facts)
    write_atomic(folder / FACTS, json.dumps(plain(bundle), indent=1, allow_nan=False) + "\n")
    return bundle


def read(path: str | pathlib.Path) -> tuple[pathlib.Path, Bundle]:
    """The folder of a bundle and what its bundle.json says. ``path`` may be a run folder, too. Raises BundleError."""
    folder = pathlib.Path(path)
    folder = folder.parent if folder.name == FACTS else folder
    try:
        folder = folder / BUNDLE if (folder / BUNDLE).is_dir() else folder
        return folder, _parsed(_text(folder / FACTS))
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BundleError(f"{folder / FACTS}: {reason}") from None
    except BundleError as error:
        raise BundleError(f"{folder / FACTS}: {error}") from None


def verify(folder: pathlib.Path, bundle: Bundle) -> None:
    """Hold the two other files against their digests. Raises BundleError."""
    for name in (OPTIONS, TENSORS):
        try:
            found = _sha256(folder / name)
        except OSError as error:
            raise BundleError(f"{folder / name}: {error.strerror}") from None
        if found != bundle.sha256.get(name):
            raise BundleError(f"{folder / name}: is not the file that {FACTS} was written with (SHA-256 differs)")


def of_findings(findings: Sequence[Finding]) -> list[Finding]:
    """The red ones, which a bundle is made for."""
    return [finding for finding in findings if finding.status in (FAIL, ERROR)]


def _opened(file: pathlib.Path) -> io.BufferedReader:
    """A regular file, for reading: a device has no end and a pipe waits for ever."""
    if file.exists() and not file.is_file():
        raise BundleError(f"{file.name} is no regular file")
    return open(file, "rb")


def _text(file: pathlib.Path) -> str:
    with _opened(file) as stream:
        raw = stream.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise BundleError(f"is larger than {MOST_BYTES} bytes")
    return raw.decode("utf-8", "strict")


def _parsed(text: str) -> Bundle:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"is not JSON: {error}") from None
    if not isinstance(values, dict) or "format" not in values:
        raise BundleError("is not a bundle of smoke")
    if values["format"] != FORMAT:
        raise BundleError(f"has format {values['format']!r:.40}, this smoke ({__version__}) reads format {FORMAT}")
    failures = values.get("failures")
    if not isinstance(failures, list) or not failures:
        raise BundleError("names no failure")
    parts = [_checked(Failure, failure, "failures: ") for failure in failures]
    bundle = _checked(Bundle, {**values, "failures": tuple(parts)}, "")
    for failure in parts:
        if failure.check not in CHECKS or failure.status not in (FAIL, ERROR):
            raise BundleError(f"this smoke has no check {failure.check!r:.40} that ended in {failure.status!r:.40}")
    return bundle


KINDS = {"str": str, "int": int, "int | None": (int, type(None)), "Mapping[str, str]": dict}
KINDS |= {"tuple[Failure, ...]": tuple, "tuple[Mapping[str, Any], ...]": list}
"""What JSON must give for each type of field."""


def _checked(owner: Any, values: Any, where: str) -> Any:
    """A dataclass from a JSON object with exactly its fields, each of its type."""
    fields = {field.name: str(field.type) for field in dataclasses.fields(owner)}
    if not isinstance(values, dict) or values.keys() != fields.keys():
        raise BundleError(f"{where}must have the fields {', '.join(fields)}")
    for name, kind in fields.items():
        value = values[name]
        good = isinstance(value, KINDS[kind]) and not isinstance(value, bool)  # type: ignore[arg-type]
        if good and kind == "Mapping[str, str]":
            good = all(isinstance(item, str) for item in value.values())
        if not good:
            raise BundleError(f"{where}{name} is not of the type {kind}")
    return owner(**values)


def _sha256(file: pathlib.Path) -> str:
    with _opened(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
