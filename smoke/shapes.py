"""The GEMMs of a configured model, on paper: names, sizes and the options they come from. Nothing is built.

``gemms`` lists the leaves that the model will have, under the names that it will give them (a test holds the list
against the real model on the meta device). From the list follow the parameter count, the memory a run needs at the very
least, and which sizes a precision recipe cannot take. All three GEMMs of a leaf are quantized, and each reduces over
another dimension (output over the inputs, grad_input over the outputs, grad_weight over the tokens), so all three sizes
must be legal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from smoke.config import DataConfig, ModelConfig


@dataclass(frozen=True)
class Size:
    """A number and the options it is computed from."""

    value: int
    formula: str
    """Option names, e.g. ``--model.hidden_size``."""


@dataclass(frozen=True)
class Gemm:
    """One leaf: sizes of its product."""

    inputs: Size
    outputs: Size
    copies: int = 1
    """Weights of these sizes: experts, or 1."""
    absorbed: bool = False
    """A per-head product whose weight belongs to another leaf."""
    called: bool = True
    """Whether the product runs; in the absorbed form linear_kv_up_proj only holds the weight."""


def gemms(model: ModelConfig) -> dict[str, Gemm]:
    """Every leaf of the model by module name, in module order."""
    found: dict[str, Gemm] = {}
    for layer in range(model.num_hidden_layers):
        found |= _layer(f"layers.{layer}", model, dense=layer < model.first_k_dense_replace)
    hidden = Size(model.hidden_size, "--model.hidden_size")
    found["output_layer"] = Gemm(hidden, Size(model.vocab_size, "--model.vocab_size"))
    if model.num_nextn_predict_layers:
        found["mtp.eh_proj"] = Gemm(Size(2 * model.hidden_size, "2 x --model.hidden_size"), hidden)
        found |= _layer("mtp.mtp_model_layer", model, dense=False)
    return found


def _layer(prefix: str, model: ModelConfig, *, dense: bool) -> dict[str, Gemm]:
    found = {f"{prefix}.self_attention.{name}": gemm for name, gemm in _attention(model)}
    if dense:
        inner = Size(model.intermediate_size, "--model.intermediate_size")
        return found | _mlp(f"{prefix}.mlp", model, inner)
    inner = Size(model.moe_intermediate_size, "--model.moe_intermediate_size")
    found |= _mlp(f"{prefix}.mlp.experts", model, inner, copies=model.n_routed_experts)
    if model.n_shared_experts:
        shared = model.n_shared_experts * model.moe_intermediate_size
        formula = "--model.n_shared_experts x --model.moe_intermediate_size"
        found |= _mlp(f"{prefix}.mlp.shared_experts", model, Size(shared, formula))
    return found


def _attention(model: ModelConfig) -> Iterator[tuple[str, Gemm]]:
    heads, nope, rope = model.num_attention_heads, model.qk_nope_head_dim, model.qk_rope_head_dim
    value, latent = model.v_head_dim, model.kv_lora_rank
    absorbed = model.attention_form == "absorbed"
    hidden_size = Size(model.hidden_size, "--model.hidden_size")
    latent_size = Size(latent, "--model.kv_lora_rank")
    per_head = "--model.num_attention_heads x"
    query = Size(heads * (nope + rope), f"{per_head} (--model.qk_nope_head_dim + --model.qk_rope_head_dim)")
    if model.q_lora_rank is None:
        yield "linear_q_proj", Gemm(hidden_size, query)
    else:
        rank = Size(model.q_lora_rank, "--model.q_lora_rank")
        yield "linear_q_down_proj", Gemm(hidden_size, rank)
        yield "linear_q_up_proj", Gemm(rank, query)
    down = Size(latent + rope, "--model.kv_lora_rank + --model.qk_rope_head_dim")
    yield "linear_kv_down_proj", Gemm(hidden_size, down)
    if model.kv_up_projection == "combined":
        both = Size(heads * (nope + value), f"{per_head} (--model.qk_nope_head_dim + --model.v_head_dim)")
        yield "linear_kv_up_proj", Gemm(latent_size, both, called=not absorbed)
    else:
        key_rows = Size(heads * nope, f"{per_head} --model.qk_nope_head_dim")
        value_rows = Size(heads * value, f"{per_head} --model.v_head_dim")
        yield "linear_k_up_proj", Gemm(latent_size, key_rows, called=not absorbed)
        yield "linear_v_up_proj", Gemm(latent_size, value_rows, called=not absorbed)
    if absorbed:
        yield "k_up_absorbed", Gemm(Size(nope, "--model.qk_nope_head_dim"), latent_size, absorbed=True)
        yield "v_up_absorbed", Gemm(latent_size, Size(value, "--model.v_head_dim"), absorbed=True)
    yield "linear_proj", Gemm(Size(heads * value, f"{per_head} --model.v_head_dim"), hidden_size)


def _mlp(prefix: str, model: ModelConfig, inner: Size, *, copies: int = 1) -> dict[str, Gemm]:
    hidden = Size(model.hidden_size, "--model.hidden_size")
    gate_up = Size(2 * inner.value, f"2 x {inner.formula}")
    return {
        f"{prefix}.linear_fc1": Gemm(hidden, gate_up, copies=copies),
        f"{prefix}.linear_fc2": Gemm(inner, hidden, copies=copies),
    }


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model: GEMM weights, embedding, routers and norms (the prediction module included)."""
    weights = sum(g.inputs.value * g.outputs.value * g.copies for g in gemms(model).values() if not g.absorbed)
    layers = model.num_hidden_layers + model.num_nextn_predict_layers
    moe_layers = layers - min(model.first_k_dense_replace, model.num_hidden_layers)
    norms = layers * (2 * model.hidden_size + (model.q_lora_rank or 0) + model.kv_lora_rank)
    norms += (1 + 3 * model.num_nextn_predict_layers) * model.hidden_size
    routers = moe_layers * model.n_routed_experts * model.hidden_size
    return weights + model.vocab_size * model.hidden_size + routers + norms


BYTES_OF_A_PARAMETER = 16
"""BF16 weight and gradient, float32 master, and the two float32 moments of AdamW."""


BYTES_OF_A_TOKEN = {"generated": 64}
"""Bytes that each token of the run takes while its batches are made, beyond the three integers that stay."""


BYTES_OF_A_SNAPSHOT, BYTES_OF_A_COMPARED_STEP = 14, 8
"""Of a parameter, while trajectories are compared bit by bit: a copy of weight, master and moments, and for each step
gradient and weight of two trajectories. (Measured: 62 bytes of a parameter at three steps, where these give 54.)"""


def least_bytes(model: ModelConfig, data: DataConfig, steps: int = 1, compared_steps: int = 0) -> int:
    """Bytes below which a run cannot go: parameter states, residual stream and logits of a batch, all batches.

    Args:
        steps: micro-batches of the run.
        compared_steps: steps of the trajectories that are compared bit by bit; 0 where none are.
    """
    tokens = data.micro_batch_size * data.sequence_length
    activations = tokens * (2 * model.hidden_size * model.num_hidden_layers + 4 * model.vocab_size)
    batches = steps * tokens * (24 + BYTES_OF_A_TOKEN.get(data.source, 0))
    states = BYTES_OF_A_PARAMETER
    if compared_steps:
        states += BYTES_OF_A_SNAPSHOT + compared_steps * BYTES_OF_A_COMPARED_STEP
    return states * parameter_count(model) + activations + batches


@dataclass(frozen=True)
class SizeRule:
    """One size that a recipe's quantizers and products must be able to divide."""

    size: Size
    multiple: int
    what: str
    """tokens, input features or output features."""
    module: str
    """The first module that has the rule."""

    @property
    def legal(self) -> bool:
        return self.size.value % self.multiple == 0

    @property
    def nearest(self) -> int:
        return nearest_multiple(self.size.value, self.multiple)


def size_rules(quantized: Mapping[str, Gemm], data: DataConfig, multiples: tuple[int, int, int]) -> list[SizeRule]:
    """What the sizes of the quantized GEMMs must be multiples of, once for each option or product of options.

    Args:
        quantized: the GEMMs that the policy quantizes.
        multiples: what tokens, input and output features must be multiples of. Experts' rows are padded by the model.
    """
    tokens = Size(data.micro_batch_size * data.sequence_length, "--data.micro_batch_size x --data.sequence_length")
    rules: dict[tuple[str, int], SizeRule] = {}
    for name, gemm in quantized.items():
        sizes = ((tokens, "tokens"), (gemm.inputs, "input features"), (gemm.outputs, "output features"))
        for (size, what), multiple in zip(sizes, multiples, strict=True):
            if what != "tokens" or ".experts." not in name:
                rules.setdefault((size.formula, multiple), SizeRule(size, multiple, what, name))
    return sorted(rules.values(), key=lambda rule: len(rule.size.formula))  # the plainest option first


def illegal_sizes(
    quantized: Mapping[str, Gemm], data: DataConfig, recipe: str, multiples: tuple[int, int, int]
) -> list[str]:
    """One line for each rule of ``size_rules`` that is broken."""
    return [
        f"{rule.size.formula} = {rule.size.value}: {recipe} takes multiples of {rule.multiple}, the nearest is "
        f"{rule.nearest} ({rule.what} of {rule.module})"
        for rule in size_rules(quantized, data, multiples)
        if not rule.legal
    ]


def nearest_multiple(value: int, multiple: int) -> int:
    """The positive multiple closest to ``value`` (the larger one of two)."""
    return max(multiple, (value + multiple // 2) // multiple * multiple)
