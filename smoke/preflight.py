"""``smoke preflight``: everything about a request that can be judged from its options alone, before any work.

``smoke run`` stops at the first thing that is wrong. Here every rule is listed, kept or broken, with the value it was
held against and the nearest legal one: sizes of each quantized GEMM, rope, heads, routing, padding of experts, memory.
Then the other recipes, emulated and native, with what would stop each, and the table of published defects
(``smoke.defects``) beside what is installed and asked. Nothing is built, allocated or written.

Limits: a rule of a kernel that reads the live tensors is the run's own check ``preflight``; and a native recipe's rules
are those of the releases that ``smoke.precision.recipe`` names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smoke import defects, rules, shapes
from smoke.config import PRECISIONS, RunConfig
from smoke.data.sources import DataError
from smoke.data.sources import preflight as data_preflight
from smoke.environment import Environment
from smoke.output import printable
from smoke.plan import Plan, Refusal, quantized_gemms, resolve
from smoke.precision.recipe import RECIPES, Recipe, canonical
from smoke.requirements import CHECKS, least_memory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

KEPT, NOTE, BROKEN = "ok", "note", "broken"
FUSED_ATTENTION_MULTIPLE = 8
"""BF16 columns that 16 bytes hold: what fused attention kernels of PyTorch ask of every head width."""


@dataclass(frozen=True)
class Rule:
    """One rule and how the request stands to it."""

    status: str
    """ok, note (it runs, but not as fast or not as meant) or broken."""
    option: str
    """The option, or the product of options, with its value."""
    rule: str
    nearest: str = ""
    """Nearest legal value, where the rule is broken and has one."""


@dataclass(frozen=True)
class Outcome:
    """What would come of the same request in one recipe."""

    precision: str
    backend: str
    """emulated, te, both, or auto for bf16; the numerics where it runs."""
    verdict: str
    """runs, error, unsupported or blocked."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Everything that ``smoke preflight`` prints."""

    config: RunConfig
    plan: Plan | None
    refusal: Refusal | None
    rules: tuple[Rule, ...]
    outcomes: tuple[Outcome, ...]
    matches: tuple[defects.Match, ...]

    @property
    def exit_code(self) -> int:
        """That of the refusal; 0 where the request would run."""
        return self.refusal.exit_code if self.refusal else 0


def examine(config: RunConfig, environment: Environment) -> Preflight:
    """Judge a request. ``config.precision`` is a canonical word or a synonym. Raises ValueError for any other."""
    recipe = canonical(config.precision)
    config = dataclasses.replace(config, precision=recipe.name)
    plan, refusal = _resolved(config, environment)
    return Preflight(
        config=config,
        plan=plan,
        refusal=refusal,
        rules=tuple(_rules(config, recipe, environment)),
        outcomes=tuple(_outcomes(config, environment)),
        matches=tuple(defects.matches(environment, config)),
    )


def _resolved(config: RunConfig, environment: Environment) -> tuple[Plan | None, Refusal | None]:
    try:
        return resolve(config, environment), None
    except Refusal as refusal:
        return None, refusal


def _rules(config: RunConfig, recipe: Recipe, environment: Environment) -> Iterator[Rule]:
    first = rules.words_and_ranges(config, CHECKS)
    if first:  # sizes of a request with such numbers mean nothing
        yield from map(_broken, first)
        return
    problems = [*rules.problems(config, CHECKS), *rules.contradictions(config.policy, recipe.name)]
    try:
        data_preflight(config.data, vocab_size=config.model.vocab_size)
    except DataError as error:
        problems.append(str(error))
    yield from map(_broken, problems)
    named = {problem.split()[0] for problem in problems}
    yield from (rule for rule in _facts(config, recipe, environment) if rule.option.split()[0] not in named)
    try:
        quantized = quantized_gemms(config, recipe) if recipe.name != "bf16" else {}
    except Refusal as refusal:
        yield _broken(refusal.message)
        return
    for size in shapes.size_rules(quantized, config.data, recipe.row_multiples):
        text = f"{recipe.name}: a multiple of {size.multiple} ({size.what} of {size.module})"
        status, nearest = (KEPT, "") if size.legal else (BROKEN, str(size.nearest))
        yield Rule(status, f"{size.size.formula} = {size.size.value}", text, nearest)


def _broken(problem: str) -> Rule:
    option, _, text = problem.partition(": ")
    rule, _, nearest = text.partition("the nearest is ")
    return Rule(BROKEN, option, (rule if nearest else text).rstrip("; "), nearest)


def _facts(config: RunConfig, recipe: Recipe, environment: Environment) -> Iterator[Rule]:
    """Rules that hold whatever the recipe quantizes. Their broken forms come from ``smoke.rules``."""
    model, data = config.model, config.data
    rope, heads = model.qk_rope_head_dim, model.num_attention_heads
    yield Rule(KEPT, f"--model.qk_rope_head_dim {rope}", f"even; tables of {rope // 2} columns, one for each pair")
    most = model.max_position_embeddings
    yield Rule(KEPT, f"--data.sequence_length {data.sequence_length}", f"2 to {most}, the rows of the rope tables")
    yield Rule(KEPT, f"--model.num_attention_heads {heads}", "any: kernels mask heads by their index in the tensor")
    yield Rule(KEPT, f"--model.vocab_size {model.vocab_size}", "257 or more: bytes and the separator")
    yield Rule(KEPT, f"--model.n_group {model.n_group}", f"divides --model.n_routed_experts {model.n_routed_experts}")
    reach = model.topk_group * (model.n_routed_experts // model.n_group)
    chosen = model.num_experts_per_tok
    yield Rule(KEPT, f"--model.num_experts_per_tok {chosen}", f"at most the {reach} experts that a token reaches")
    yield from _padding(config, recipe)
    yield _attention_widths(config, environment)
    yield _memory(config, recipe, environment)


def _padding(config: RunConfig, recipe: Recipe) -> Iterator[Rule]:
    model, data = config.model, config.data
    multiple, experts = recipe.expert_row_multiple, model.n_routed_experts
    if model.first_k_dense_replace < model.num_hidden_layers or model.num_nextn_predict_layers:
        rows = data.micro_batch_size * data.sequence_length * model.num_experts_per_tok
        text = f"{recipe.name}: zeros fill each expert's rows to a multiple of {multiple}: "
        yield Rule(KEPT, f"expert rows = {rows:,}", f"{text}at most {experts * (multiple - 1):,} more a layer")


def _attention_widths(config: RunConfig, environment: Environment) -> Rule:
    model, multiple = config.model, FUSED_ATTENTION_MULTIPLE
    absorbed = model.attention_form == "absorbed"
    query = (model.kv_lora_rank if absorbed else model.qk_nope_head_dim) + model.qk_rope_head_dim
    value = model.kv_lora_rank if absorbed else model.v_head_dim
    cuda = config.device != "cpu" and environment.cuda_available
    slow = cuda and (query % multiple or value % multiple)
    text = f"columns of query and key, and of value: multiples of {multiple} for PyTorch's fused kernels on CUDA"
    nearest = f"{shapes.nearest_multiple(query, multiple)} and {shapes.nearest_multiple(value, multiple)}"
    return Rule(NOTE if slow else KEPT, f"attention widths = {query} and {value}", text, nearest if slow else "")


def _memory(config: RunConfig, recipe: Recipe, environment: Environment) -> Rule:
    need = least_memory(config, recipe)
    cuda = config.device != "cpu" and environment.cuda_available
    have = environment.devices[0].memory_bytes if cuda else environment.memory_bytes
    device = "cuda" if cuda else "cpu"
    status = BROKEN if have and need > have else KEPT
    limit = f"{have / 2**30:,.1f} GiB of this {device}" if have else f"the memory of this {device}, which is unknown"
    return Rule(status, f"memory = {need / 2**30:,.2f} GiB or more", f"at most {limit}")


def _outcomes(config: RunConfig, environment: Environment) -> Iterator[Outcome]:
    """One row for each recipe; backends that end alike share it."""
    for precision in PRECISIONS:
        ends: dict[tuple[str, str], list[str]] = {}
        for backend in ("auto",) if precision == "bf16" else ("emulated", "te"):
            asked = dataclasses.replace(config, precision=precision, backend=backend)
            plan, refusal = _resolved(asked, environment)
            end = (refusal.verdict, refusal.message) if refusal else ("runs", _takes(RECIPES[precision]))
            ends.setdefault(end, []).append(plan.numerics if plan else backend)
        yield from (Outcome(precision, ", ".join(how), *end) for end, how in ends.items())


def _takes(recipe: Recipe) -> str:
    """What sizes a recipe takes, in words."""
    tokens, inputs, outputs = recipe.row_multiples
    if recipe.name == "bf16":
        return "any size"
    return (
        f"multiples of {tokens} tokens, {inputs} input and {outputs} output features; "
        f"rows of an expert padded to {recipe.expert_row_multiple}"
    )


def print_preflight(found: Preflight, console: Console | None = None) -> None:
    """Print three tables and the verdict, the last line, to the console (default: standard output)."""
    from rich.console import Console

    console = console or Console(highlight=False)
    config = found.config
    request = f"{config.precision} with recompute {'+'.join(config.recompute) or 'none'}, layout {config.layout}"
    console.print(_table(f"rules for {request}", ("status", "option", "rule", "nearest legal"), _rule_cells(found)))
    outcomes = [(o.precision, o.backend, o.verdict, o.reason) for o in found.outcomes]
    console.print(_table("this request in every recipe", ("precision", "backend", "verdict", "why"), outcomes))
    console.print(defect_table(DEFECTS_TITLE, found.matches))
    kept = sum(rule.status == KEPT for rule in found.rules)
    broken = sum(rule.status == BROKEN for rule in found.rules)
    verdict = found.refusal.verdict.upper() if found.refusal else "PASS"
    said = f"{found.refusal.message}; " if found.refusal else ""
    counts = f"{kept} rules kept, {broken} broken"
    console.print(_text(f"{verdict}: {request}: {said}{counts}; exit code {found.exit_code}"), soft_wrap=True)


DEFECTS_TITLE = "published defects (met: installed and asked for; asked for: would be met where it is installed)"


def _rule_cells(found: Preflight) -> list[tuple[str, ...]]:
    order = (BROKEN, NOTE, KEPT)
    ordered = sorted(found.rules, key=lambda rule: order.index(rule.status))
    return [(rule.status, rule.option, rule.rule, rule.nearest) for rule in ordered]


def defect_table(title: str, matches: Sequence[defects.Match]) -> Table:
    """Met and asked for first; rows that concern neither this machine nor this request are left out."""
    order = (defects.MET, defects.ASKED, defects.INSTALLED)
    shown = sorted((match for match in matches if match.status in order), key=lambda match: order.index(match.status))
    return _table(title, ("status", "defect"), [(match.status, _in_lines(match)) for match in shown])


def _in_lines(match: defects.Match) -> str:
    d = match.defect
    here = f"{d.package} {match.installed or 'is not installed'}, affected are {d.versions}"
    return f"{d.name}: {here}\n{d.trigger}: {d.effect}\n{d.remedy}\n{d.reference}"


def _table(title: str, titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in titles:
        table.add_column(heading, overflow="fold", vertical="top")
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(text: str):
    from rich.text import Text

    return Text("\n".join(map(printable, text.split("\n"))))
