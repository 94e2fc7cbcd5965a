"""From what was asked and what is here to what will be done. Pure: no torch, no file, no device is touched.

``resolve`` decides every ``auto``, each with a reason that the report prints; refuses before any work what cannot run;
and lists the checks this run requires, and the others with the reason why not. An explicit word is never replaced by
another one. Words and numbers are judged in ``smoke.rules``, sizes of GEMMs in ``smoke.shapes``, and the checks
that a run requires are listed in ``smoke.requirements``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from smoke import __version__, defects, rules, shapes
from smoke.config import RunConfig
from smoke.data.sources import DataError, preflight
from smoke.environment import Environment
from smoke.output import printable
from smoke.precision.policy import PolicyError, last_layers, plan_leaves
from smoke.precision.recipe import RECIPES, Recipe, canonical
from smoke.requirements import CHECKS, least_memory, required_checks

ABSURD_BYTES = 2**45
"""32 TiB: more memory than any single host has. Beyond it the request, not this machine, is wrong."""

USAGE, MISSING, BLOCKED = 2, 4, 5
VERDICT_OF_CODE = {2: "error", 4: "unsupported", 5: "blocked"}


class Refusal(Exception):
    """The request will not be run. ``message`` is one line that names what to change."""

    def __init__(self, exit_code: int, message: str):
        self.exit_code, self.message = exit_code, printable(message)
        super().__init__(self.message)

    @property
    def verdict(self) -> str:
        """error (nothing could run this), unsupported (this machine lacks something) or blocked (by a package)."""
        return VERDICT_OF_CODE.get(self.exit_code, "error")


@dataclass(frozen=True)
class Choice:
    """One decision: what was decided, how, and why."""

    choice: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run, with nothing left to decide. ``config`` is what was asked, in canonical words."""

    config: RunConfig
    recipe: Recipe
    backend: str
    """emulated, or none (bf16 quantizes nothing)."""
    impl: str
    """reference or triton."""
    device: str
    """cpu or cuda."""
    numerics: str
    """native, emulated, mixed or bf16."""
    choices: tuple[Choice, ...]
    required: tuple[str, ...]
    """Checks that must pass, in the order of the report."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Reason of every check that will not run. A check that is also required makes the run end in exit code 4."""
    environment: Environment | None = None
    """The machine that the plan was made for."""
    compared: tuple[str, ...] = ("parameter", "slice", "free")
    """What gradient_parity has to have rows of: whole parameters, their slices, all of them with routing free."""


def resolve(config: RunConfig, environment: Environment) -> Plan:
    """Decide everything. Raises Refusal."""
    _refuse_first([problem for problem in (defects.blocker(environment),) if problem], BLOCKED)
    config, recipe = _canonical(config)
    _refuse_first(rules.problems(config, CHECKS))
    _refuse_first(rules.contradictions(config.policy, recipe.name))
    _refuse_data(config)
    quantized = quantized_gemms(config, recipe)
    _refuse_sizes(config, recipe, quantized)
    device = _device(config, environment)
    _refuse_memory(config, recipe, environment, device.value)
    backend = _backend(config, recipe, environment, device.value)
    impl = _impl(config, environment, device.value)
    required, skipped = required_checks(config, recipe)
    numerics = "emulated" if backend.value == "emulated" else "bf16"
    return Plan(
        config=config,
        recipe=recipe,
        backend=backend.value,
        impl=impl.value,
        device=device.value,
        numerics=numerics,
        environment=environment,
        choices=(
            Choice("precision", recipe.name, "asked for"),
            device,
            backend,
            Choice("numerics", numerics, _NUMERICS[numerics]),
            impl,
            *_arithmetic(environment, device.value),
            Choice("layout", config.layout, _LAYOUTS[config.layout]),
            Choice("recompute", ", ".join(config.recompute) or "none", "asked for"),
            *_policy(config, recipe, len(quantized)),
            *_known_defects(config, environment),
        ),
        required=required,
        skipped=skipped,
    )


_NUMERICS = {
    "emulated": "operands are quantized and dequantized here, products are exact; not Transformer Engine's kernels",
    "bf16": "nothing is quantized",
}
_LAYOUTS = {
    "sbhd": "rows of equal length",
    "thd": "packed sequences; attention never crosses a sequence edge",
}


def _refuse_first(problems: list[str], code: int = USAGE) -> None:
    if not problems:
        return
    others = [problem.partition(":")[0] for problem in problems[1:]]
    also = f" (also wrong: {', '.join(others)})" if others else ""
    raise Refusal(code, problems[0] + also)


def _canonical(config: RunConfig) -> tuple[RunConfig, Recipe]:
    try:
        recipe = canonical(config.precision)
    except ValueError as error:
        raise Refusal(USAGE, f"--precision: {error}") from None
    return dataclasses.replace(config, precision=recipe.name), recipe


def _refuse_data(config: RunConfig) -> None:
    try:
        preflight(config.data, vocab_size=config.model.vocab_size)
    except DataError as error:
        raise Refusal(USAGE, str(error)) from None


def quantized_gemms(config: RunConfig, recipe: Recipe) -> dict[str, shapes.Gemm]:
    """The GEMMs that the policy quantizes and that run, by module name. Refusal where a pattern matches nothing."""
    gemms = shapes.gemms(config.model)
    try:
        leaves = plan_leaves(
            {name: gemm.absorbed for name, gemm in gemms.items()},
            config.policy,
            quantizes=recipe.name != "bf16",
            last_share=recipe.last_layers_bf16_share,
            num_layers=config.model.num_hidden_layers,
        )
    except PolicyError as error:
        raise Refusal(USAGE, str(error)) from None
    return {name: gemm for name, gemm in gemms.items() if leaves[name].quantized and gemm.called}


def _refuse_sizes(config: RunConfig, recipe: Recipe, quantized: Mapping[str, shapes.Gemm]) -> None:
    if recipe.name == "bf16":
        return
    if not quantized:
        raise Refusal(
            USAGE, f"--policy: nothing is left for {recipe.name} to quantize; keep fewer layers in BF16, or use bf16"
        )
    _refuse_first(shapes.illegal_sizes(quantized, config.data, recipe.name, recipe.row_multiples))


def _device(config: RunConfig, environment: Environment) -> Choice:
    if config.device == "cpu":
        return Choice("device", "cpu", "asked for")
    if environment.cuda_available:
        reason = "asked for" if config.device == "cuda" else "torch sees a CUDA device"
        return Choice("device", "cuda", f"{reason}: {environment.devices[0].name}")
    if config.device == "cuda":
        raise Refusal(MISSING, f"--device cuda: {_no_cuda(environment)}; use --device cpu")
    return Choice("device", "cpu", _no_cuda(environment))


def _no_cuda(environment: Environment) -> str:
    if not environment.cuda_version:
        return f"torch {environment.packages.get('torch', '')} is built without CUDA"
    return "torch sees no CUDA device"


def _refuse_memory(config: RunConfig, recipe: Recipe, environment: Environment, device: str) -> None:
    need = least_memory(config, recipe)
    have = environment.devices[0].memory_bytes if device == "cuda" else environment.memory_bytes
    count = shapes.parameter_count(config.model)
    text = f"--model, --data, --steps: {count:,} parameters and {config.steps:,} batches need at least "
    text += f"{need / 2**30:,.1f} GiB"
    if need > ABSURD_BYTES:
        raise Refusal(USAGE, f"{text}, more than any single machine has; lower --model sizes, the batch or --steps")
    if have and need > have:
        raise Refusal(
            MISSING, f"{text}, this {device} has {have / 2**30:,.1f} GiB; lower --model sizes, the batch or --steps"
        )


def _backend(config: RunConfig, recipe: Recipe, environment: Environment, device: str) -> Choice:
    if config.backend == "te":
        blocker = native_blocker(recipe.name, environment, device)
        raise Refusal(MISSING, f"--backend te: {blocker}; --backend emulated works")
    if recipe.name == "bf16":
        return Choice("backend", "none", "bf16 quantizes nothing, so nothing has to be emulated")
    if config.backend == "emulated":
        return Choice("backend", "emulated", "asked for")
    return Choice("backend", "emulated", native_blocker(recipe.name, environment, device))


def native_blocker(recipe: str, environment: Environment, device: str) -> str:
    """Why Transformer Engine does not make the numbers of this run."""
    missing = environment.missing("transformer-engine")
    if missing:
        return f"{missing} (it comes with the extra te)"
    if not environment.cuda_available:
        return f"Transformer Engine needs a CUDA device and {_no_cuda(environment)}"
    if device != "cuda":
        return f"Transformer Engine needs a CUDA device and the device is {device}"
    gate, device_capability = RECIPES[recipe].gate, environment.devices[0].capability
    reason = environment.transformer_engine.get(recipe, "") or (gate.blocker(device_capability) if gate else "")
    if reason:
        return f"Transformer Engine cannot run {recipe} on {environment.devices[0].name}: {reason}"
    version = environment.packages["transformer-engine"]
    return f"smoke {__version__} does not drive Transformer Engine yet (installed: {version})"


def _impl(config: RunConfig, environment: Environment, device: str) -> Choice:
    missing = environment.missing("triton")
    if config.check.triton_interpreter and missing:
        raise Refusal(MISSING, f"--check.triton_interpreter: {missing}; leave it out")
    if config.impl == "triton":
        if device == "cpu":
            raise Refusal(MISSING, "--impl triton: Triton kernels need a CUDA device; use --impl reference")
        if missing:
            raise Refusal(MISSING, f"--impl triton: {missing}; use --impl reference")
    if config.impl != "auto":
        return Choice("impl", config.impl, "asked for")
    if device == "cuda" and not missing:
        return Choice("impl", "triton", "a CUDA device and Triton are here")
    return Choice("impl", "reference", missing if device == "cuda" else "Triton kernels need a CUDA device")


def _arithmetic(environment: Environment, device: str) -> tuple[Choice, Choice]:
    if device == "cuda":
        products = Choice("products", "bf16", "BF16 tensor cores, accumulated in float32")
        return products, Choice("core attention", "scaled_dot_product_attention in bf16", "PyTorch's, on the device")
    if environment.cpu_has_bf16:
        products = Choice("products", "bf16", "the CPU has BF16 instructions")
        return products, Choice("core attention", "scaled_dot_product_attention in bf16", products.reason)
    reason = "the CPU has no BF16 instructions; BF16 operands are widened (exactly) and results rounded once"
    return (
        Choice("products", "float32", reason),
        Choice("core attention", "scaled_dot_product_attention in float32", reason),
    )


def _policy(config: RunConfig, recipe: Recipe, quantized: int) -> list[Choice]:
    if recipe.name == "bf16":
        return []
    policy = config.policy
    last = last_layers(policy, recipe.last_layers_bf16_share, config.model.num_hidden_layers)
    own = f"{recipe.name}'s own rule" if policy.last_layers_bf16 is None else "asked for"
    absorbed = "as in Megatron-core" if policy.absorbed_kv == "bf16" else "asked for"
    return [
        Choice("quantized GEMM modules", str(quantized), "what the policy leaves to the recipe"),
        Choice("first layers in BF16", str(policy.first_layers_bf16), "--policy.first_layers_bf16"),
        Choice("last layers in BF16", str(last), own),
        Choice("kept in BF16 by name", ", ".join(policy.keep_bf16) or "none", "--policy.keep_bf16"),
        Choice("absorbed K-up and V-up", policy.absorbed_kv, absorbed),
        Choice("expert rows", f"multiples of {recipe.expert_row_multiple}", "no quantization block spans two experts"),
    ]


def _known_defects(config: RunConfig, environment: Environment) -> list[Choice]:
    met = [match for match in defects.matches(environment, config) if match.status == defects.MET]
    return [
        Choice(
            "known defect",
            f"{match.defect.name} ({match.defect.package} {match.installed})",
            f"{match.defect.trigger}: {match.defect.effect}; {match.defect.remedy} ({match.defect.reference})",
        )
        for match in met
    ]
