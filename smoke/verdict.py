"""Judge what the callbacks hold after any training: the front door of the checks as a library.

    from smoke.callbacks import Finite, GradientPresence, LossTracker
    from smoke.verdict import judge

    trainer = lightning.Trainer(callbacks=[LossTracker(), Finite(), GradientPresence()])
    trainer.fit(module, loader)
    verdict = judge(trainer.callbacks)
    print(verdict)                      # one line a check
    verdict.require()                   # AssertionError that names what is red

Each callback asks for the checks that it feeds, and callbacks that are not ours are passed over:

    LossTracker and Finite              finite
    GradientPresence                    gradient_presence
    GradientParity                      gradient_parity, and quantization_engaged where the precision quantizes
    Coverage, WeightFreshness           coverage, weight_freshness
    SavedTensors and LossTracker        saved_tensors
    DtypeLedger and LossTracker         dtype_ledger: BF16 parameters with float32 masters, as in smoke's own runs
    LossTracker and Throughput          throughput
    LossTracker and reference_losses    loss_tracking

``checks=`` names them instead. Limits are those of the recipe that ``precision`` names, or your own. The other checks
of a smoke run compare trajectories, twin forms or kernels of its own model; they cannot be asked for here.

Judged are the rows of this rank, and of the steps that the callbacks saw (a checkpoint carries their rows along).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from smoke.callbacks.coverage import Coverage
from smoke.callbacks.dtype_ledger import DtypeLedger
from smoke.callbacks.finite import Finite
from smoke.callbacks.gradient_parity import GradientParity
from smoke.callbacks.loss_tracker import LossTracker
from smoke.callbacks.presence import GradientPresence
from smoke.callbacks.saved_tensors import SavedTensors
from smoke.callbacks.step_log import merge
from smoke.callbacks.throughput import Throughput
from smoke.callbacks.weight_freshness import WeightFreshness
from smoke.checks import ERROR, PASS, SKIP, Finding
from smoke.checks import judge as judge_record
from smoke.config import CheckConfig, ModelConfig, RunConfig, nearest
from smoke.plan import Plan
from smoke.precision.recipe import Limits, Recipe, canonical
from smoke.record import LossCurves, Record

Kind = TypeVar("Kind")

NEEDS: dict[str, tuple[type, ...]] = {
    "coverage": (Coverage,),
    "gradient_parity": (GradientParity,),
    "quantization_engaged": (GradientParity,),
    "weight_freshness": (WeightFreshness,),
    "finite": (Finite, LossTracker),
    "saved_tensors": (SavedTensors, LossTracker),
    "dtype_ledger": (DtypeLedger, LossTracker),
    "gradient_presence": (GradientPresence,),
    "loss_tracking": (LossTracker,),
    "throughput": (Throughput, LossTracker),
}
"""The callbacks that each check needs; the first one asks for it."""


@dataclass(frozen=True)
class Verdict:
    """What the checks found. Nothing judged is no pass."""

    findings: tuple[Finding, ...]
    record: Record

    @property
    def passed(self) -> bool:
        """Whether something is PASS and nothing is red. SKIP (with its reason) is neither."""
        return {PASS} <= {finding.status for finding in self.findings} <= {PASS, SKIP}

    def __getitem__(self, name: str) -> Finding:
        """The finding of one check; KeyError names those that were judged."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"{name} was not judged; judged are {', '.join(f.name for f in self.findings) or 'none'}")

    def require(self, *names: str) -> None:
        """Raise AssertionError, with a line for each red check, unless the run ``passed``.

        Named checks have to be PASS, each of them: one that was skipped did not run.
        """
        allowed = {PASS} if names else {PASS, SKIP}
        chosen = [self[name] for name in names] if names else list(self.findings)
        red = [str(finding) for finding in chosen if finding.status not in allowed]
        if red or not (names or self.passed):
            raise AssertionError("\n".join(red) or "nothing was judged")

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


def judge(
    callbacks: Iterable[Any],
    *,
    precision: str = "bf16",
    limits: Mapping[str, float] | None = None,
    checks: Sequence[str] | None = None,
    reference_losses: Sequence[float] = (),
    noise_losses: Sequence[Sequence[float]] = (),
) -> Verdict:
    """Judge the rows that ``callbacks`` hold (``trainer.callbacks`` will do) after training.

    Args:
        callbacks: callbacks of smoke among any others.
        precision: recipe whose limits hold; bf16 quantizes nothing, and takes gradients that equal the reference's.
        limits: your own in place of some of the recipe's, by name: {"gradient_error_max": 0.02}.
        checks: names of the checks to judge; by default those that the callbacks feed. One that lacks its callback, or
            rows to judge, is an ERROR.
        reference_losses: losses of a run that this one is to follow, one for each step, in nats.
        noise_losses: losses of runs that differ from it by rounding alone: the noise floor. By default zero.

    Raises:
        ValueError: the precision, a limit or a check is unknown, no check is left, or a callback is there twice.
    """
    given = list(callbacks)
    recipe = _with_limits(canonical(precision), limits or {})
    names = _chosen(given, recipe, checks, bool(reference_losses))
    record = collect(given)
    twin = tuple(reference_losses)
    record.curves = LossCurves(
        run=tuple(row.loss for row in record.steps),
        twin=twin,
        perturbed=tuple(map(tuple, noise_losses)) or ((twin,) if twin else ()),
    )
    findings = judge_record(record, _plan(given, recipe, names, record))
    return Verdict(tuple(_explained(finding, given) for finding in findings), record)


def _with_limits(recipe: Recipe, own: Mapping[str, float]) -> Recipe:
    known = [field.name for field in fields(Limits)]
    for name in own:
        if name not in known:
            raise ValueError(f"no limit {name!r}; the nearest is {nearest(name, known)}, known are {', '.join(known)}")
    return replace(recipe, limits=replace(recipe.limits, **own))


def collect(callbacks: Iterable[Any]) -> Record:
    """What the callbacks measured on this rank, as a record. Steps that were not timed have NaN for times."""
    given, record = list(callbacks), Record()
    loss, speed, finite = _find(given, LossTracker), _find(given, Throughput), _find(given, Finite)
    if loss is not None:
        timed = {step.step: step for step in speed.meter.steps} if speed is not None else {}
        record.steps = [merge(sample, timed.get(sample.step)) for sample in loss.samples]
    if speed is not None:
        record.throughput = speed.summary()
    if finite is not None:
        record.finite, record.finite_looked, record.finite_steps = list(finite.rows), finite.looked, finite.steps
        record.finite_kinds = tuple(sorted(finite.meter.kinds))
    if (gradients := _find(given, GradientParity)) is not None:
        record.gradients = list(gradients.rows)
    if (presence := _find(given, GradientPresence)) is not None:
        record.presence = presence.rows()
    if (coverage := _find(given, Coverage)) is not None:
        record.coverage = list(coverage.rows)
    if (freshness := _find(given, WeightFreshness)) is not None:
        record.freshness = list(freshness.rows)
    if (saved := _find(given, SavedTensors)) is not None:
        record.saved, record.saved_looked, record.saved_steps = list(saved.rows), saved.looked, saved.steps
    if (dtypes := _find(given, DtypeLedger)) is not None:
        record.dtypes, record.dtype_steps = dtypes.rows(), dtypes.steps
    return record


def _find(callbacks: Sequence[Any], kind: type[Kind]) -> Kind | None:
    found = [callback for callback in callbacks if isinstance(callback, kind)]
    if len(found) > 1:
        raise ValueError(f"{len(found)} callbacks are {kind.__name__}: judge them one at a time")
    return found[0] if found else None


def _chosen(given: Sequence[Any], recipe: Recipe, names: Sequence[str] | None, has_reference: bool) -> tuple[str, ...]:
    """The checks asked for, or those that the callbacks feed."""
    for name in names or ():
        if name not in NEEDS:
            raise ValueError(
                f"no check {name!r} here; the nearest is {nearest(name, NEEDS)}, known are {', '.join(NEEDS)}"
            )
    if names is None:
        unfit = {"loss_tracking": not has_reference, "quantization_engaged": recipe.name == "bf16"}
        names = [name for name, kinds in NEEDS.items() if not unfit.get(name) and _find(given, kinds[0]) is not None]
    if not names:
        kinds = ", ".join(type(callback).__name__ for callback in given) or "no callback"
        raise ValueError(f"nothing to judge in {kinds}: see smoke.verdict for what each check needs")
    return tuple(names)


def _plan(given: Sequence[Any], recipe: Recipe, names: tuple[str, ...], record: Record) -> Plan:
    """What the checks have to know of this run: its steps, when gradients were due, and what was compared."""
    parity, speed = _find(given, GradientParity), _find(given, Throughput)
    steps = [row.step for row in record.steps] or [row.step for row in record.gradients]
    start, every = (parity.first, parity.every) if parity is not None else (0, 1)
    while steps and start < steps[0]:  # resumed without the callbacks' state: what was due before was not seen
        start += every
    return Plan(
        config=RunConfig(
            precision=recipe.name,
            steps=max(steps, default=-1) + 1,
            model=ModelConfig(attention_form="plain"),
            check=CheckConfig(gradient_parity_every=every),
        ),
        recipe=replace(recipe, warmup_steps=start),
        backend="none",
        impl="reference",
        device="cpu",
        numerics=speed.label if speed is not None else "native",
        choices=(),
        required=names,
        compared=parity.compared if parity is not None else (),
    )


def _explained(finding: Finding, given: Sequence[Any]) -> Finding:
    """An ERROR that comes of a missing callback says which."""
    missing = [kind.__name__ for kind in NEEDS[finding.name] if _find(given, kind) is None]
    if finding.status != ERROR or not missing:
        return finding
    return replace(finding, detail=f"needs {' and '.join(missing)} among the callbacks")
