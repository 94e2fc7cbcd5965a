"""What a run measured: typed rows, and their JSON form.

Callbacks and trajectories append rows, ``smoke.checks`` judges them, ``smoke.report`` prints them. Rows hold plain
Python values (no tensor), units stand in the field names, and a number that is not finite stays a float here; the JSON
form writes null for it (the hex field of a loss tells which).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from smoke.record.baseline import BaselineRows, RunMark
from smoke.record.contracts import AttentionRow, RopeRow, SavedRow
from smoke.record.ledgers import DtypeRow, FreshnessRow, NeutralRow
from smoke.record.memory import MemoryRow
from smoke.record.steps import AccumulationRow, ResumeRow
from smoke.record.values import json_line as json_line
from smoke.record.values import percentile as percentile
from smoke.record.values import plain as plain


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One optimizer step of the watched run. ``loss_hex`` is the float's exact hexadecimal form."""

    step: int
    loss: float
    loss_hex: str
    grad_norm: float
    tokens: int
    """Label tokens that count in the loss."""
    padded_tokens: int
    """All positions of the batch, ignored labels included."""
    step_time_ms: float
    forward_ms: float
    backward_ms: float
    batch_sha256: str


@dataclass(frozen=True, kw_only=True)
class GradientRow:
    """Gradient of one parameter, or of one slice of it, against the BF16 twin's."""

    step: int
    routing: str
    """replayed (the twin takes the run's expert choices) or free."""
    parameter: str
    slice: str
    """Empty for the whole parameter."""
    quantized: bool
    """Whether the leaf that owns the parameter is converted."""
    relative_error: float
    """norm(g - g_ref) / norm(g_ref)."""
    cosine: float
    norm: float
    reference_norm: float


@dataclass(frozen=True, kw_only=True)
class CoverageRow:
    """One GEMM of one leaf: what the policy planned and how often it really ran quantized, and in BF16."""

    module: str
    gemm: str
    """output, grad_input or grad_weight."""
    format: str
    """Element formats of the operands, e.g. ``e4m3 x e4m3``, or ``bf16``."""
    planned: bool
    """Whether the policy quantizes it."""
    reason: str
    quantized_calls: int
    bf16_calls: int
    replay_quantized_calls: int
    """Calls made while a recompute region was replayed."""
    replay_bf16_calls: int


@dataclass(frozen=True, kw_only=True)
class BitRow:
    """One quantity compared to the last bit between two trajectories from one snapshot."""

    kind: str
    """rerun (the same trajectory twice: the noise floor) or recompute (recompute on against off)."""
    step: int
    quantity: str
    """loss, gradient or weight."""
    name: str
    """Parameter name; empty for the loss."""
    equal: bool
    slice: str = ""
    """Named slice that holds the first difference, where the parameter has slices."""
    first_index: tuple[int, ...] = ()
    left_hex: str = ""
    right_hex: str = ""
    mismatches: int = 0
    elements: int = 0


@dataclass(frozen=True, kw_only=True)
class QuantizerRow:
    """Known-answer case put through the live recipe's own quantizers."""

    case: str
    elements: int
    mismatches: int
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class TwinRow:
    """absorbed_parity or packed_parity: one tensor of two mathematically equal forms, in float64."""

    kind: str
    """absorbed, packed, or packed_leak (change of sequence B when only sequence A changes: exactly zero)."""
    tensor: str
    relative_error: float


@dataclass(frozen=True, kw_only=True)
class FiniteRow:
    """A tensor that was not finite, seen before any quantization."""

    step: int
    kind: str
    """loss, input, output_gradient, gradient or weight."""
    name: str
    nan: int
    """Elements that are NaN; 1 for "at least one" in an input or output gradient, which is gone when it is judged."""
    inf: int


@dataclass(frozen=True, kw_only=True)
class PresenceRow:
    """Gradient presence of one parameter over the run."""

    parameter: str
    present_steps: int
    nonzero_steps: int
    steps: int
    """Steps in which a gradient that is not zero was expected; the two counts above are of these steps."""
    may_be_zero: bool
    """True where none was expected in any step, e.g. of an expert that never got a token."""


@dataclass(frozen=True, kw_only=True)
class PreflightRow:
    """One size of the live model or batch beside what the recipe or the kernel takes."""

    name: str
    """Module or tensor."""
    quantity: str
    """What was measured, e.g. ``in_features`` or ``rope table width``."""
    value: int
    rule: str
    """multiple (value is a positive multiple of required), equal, or at_least."""
    required: int


@dataclass(frozen=True, kw_only=True)
class LossCurves:
    """Losses of the run, of its BF16 twin, and of the twin with perturbed weights (same data)."""

    run: tuple[float, ...] = ()
    twin: tuple[float, ...] = ()
    perturbed: tuple[tuple[float, ...], ...] = ()
    other_seed: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ThroughputSummary:
    """Timing aggregated over the steps after warm-up."""

    warmup_steps: int
    measured_steps: int
    tokens: int
    tokens_per_s: float
    step_time_ms_p50: float
    step_time_ms_p95: float
    forward_ms_p50: float
    backward_ms_p50: float
    step_time_sum_ms: float
    """Sum of the measured steps' own times."""
    wall_ms: float
    """Clock from the first to the last measured step, taken independently."""
    excluded_ms: float
    """Within that time, what callbacks, validation and data loading took; no part of any step."""
    label: str
    """emulation, native or bf16."""


@dataclass(kw_only=True)
class Record:
    """Everything measured in one run; lists grow while it goes on."""

    preflight: list[PreflightRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    gradients: list[GradientRow] = field(default_factory=list)
    coverage: list[CoverageRow] = field(default_factory=list)
    bits: list[BitRow] = field(default_factory=list)
    quantizer: list[QuantizerRow] = field(default_factory=list)
    twins: list[TwinRow] = field(default_factory=list)
    rope: list[RopeRow] = field(default_factory=list)
    attention: list[AttentionRow] = field(default_factory=list)
    saved: list[SavedRow] = field(default_factory=list)
    saved_looked: int = 0
    """Saved tensors whose version was looked at in training."""
    saved_steps: int = 0
    """Optimizer steps in which it was."""
    finite: list[FiniteRow] = field(default_factory=list)
    finite_looked: int = 0
    """Tensors that the finite callback looked at."""
    finite_kinds: tuple[str, ...] = ()
    """Kinds of those tensors, as in ``FiniteRow.kind``."""
    finite_steps: int = 0
    """Optimizer steps in which it looked at all of them."""
    presence: list[PresenceRow] = field(default_factory=list)
    freshness: list[FreshnessRow] = field(default_factory=list)
    dtypes: list[DtypeRow] = field(default_factory=list)
    """In the order in which they were first seen."""
    dtype_steps: int = 0
    """Optimizer steps in which types were looked at."""
    accumulation: list[AccumulationRow] = field(default_factory=list)
    resumed: list[ResumeRow] = field(default_factory=list)
    neutral: list[NeutralRow] = field(default_factory=list)
    neutral_looks: dict[str, int] = field(default_factory=dict)
    """How often the state before and after each hook of the callbacks was compared."""
    watched_losses: tuple[str, ...] = ()
    """Exact hex of the losses of the first steps, with callbacks."""
    unwatched_losses: tuple[str, ...] = ()
    """The same steps from the same state without any callback."""
    memory: list[MemoryRow] = field(default_factory=list)
    curves: LossCurves = field(default_factory=LossCurves)
    loss_sums: tuple[float, ...] | None = None
    """The run's losses from their sums; None where nothing takes them."""
    throughput: ThroughputSummary | None = None
    comparison_ms: dict[int, float] = field(default_factory=dict)
    """By step, what its gradient comparison took by a clock of its own: work that no step time may hold."""
    tokens: int = 0
    """Label tokens of all steps and ranks."""
    mean_loss: float | None = None
    """Mean loss in nats over those tokens."""
    peak_gib: float | None = None
    """Peak device memory (CUDA) or peak resident set of the process (CPU)."""
    held_mib: float | None = None
    mark: RunMark | None = None
    """None until there are batches to tell the key by."""
    baseline: BaselineRows | None = None
    """None where no baseline was asked for."""
    entropy_floor: float | None = None
    """Known lower bound of the loss in nats a token, where the data source has one."""
