"""What no machine could run: unknown words, numbers out of range, options that contradict each other.

Each problem is one line that begins with the option to change and ends with the nearest legal value. Words that need
the precision recipe are in ``smoke.plan``, sizes that a recipe cannot take in ``smoke.shapes``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from smoke.config import BACKENDS, DEVICES, IMPLS, LAYOUTS, REGIONS, PolicyConfig, RunConfig, nearest

WORDS: dict[str, Sequence[str]] = {
    "backend": BACKENDS,
    "impl": IMPLS,
    "layout": LAYOUTS,
    "device": DEVICES,
    "model.attention_form": ("absorbed", "plain"),
    "model.kv_up_projection": ("combined", "split"),
    "model.attention": ("native",),
    "policy.absorbed_kv": ("bf16", "recipe"),
    "policy.gradient_format": ("auto", "e4m3", "e5m2"),
    "policy.amax_compute_algo": ("max", "most_recent"),
}

LARGEST = 2**40
"""Largest size: beyond anything that is ever built, and products of several still fit a float."""

RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, 1_000_000),
    "seed": (0, 2**32 - 1),
    "model.hidden_size": (1, LARGEST),
    "model.num_hidden_layers": (1, 10_000),
    "model.first_k_dense_replace": (0, LARGEST),
    "model.intermediate_size": (1, LARGEST),
    "model.moe_intermediate_size": (1, LARGEST),
    "model.num_attention_heads": (1, LARGEST),
    "model.q_lora_rank": (1, LARGEST),
    "model.kv_lora_rank": (1, LARGEST),
    "model.qk_nope_head_dim": (1, LARGEST),
    "model.qk_rope_head_dim": (2, LARGEST),
    "model.v_head_dim": (1, LARGEST),
    "model.n_routed_experts": (1, 65_536),
    "model.n_shared_experts": (0, LARGEST),
    "model.num_experts_per_tok": (1, LARGEST),
    "model.n_group": (1, LARGEST),
    "model.topk_group": (1, LARGEST),
    "model.num_nextn_predict_layers": (0, 1),
    "model.max_position_embeddings": (2, LARGEST),
    "model.routed_scaling_factor": (0, math.inf),
    "model.aux_loss_alpha": (0, math.inf),
    "model.bias_update_speed": (0, math.inf),
    "model.mtp_loss_weight": (0, math.inf),
    "model.rms_norm_eps": (0, 1),
    "model.initializer_range": (0, math.inf),
    "model.rope_theta": (1, math.inf),
    "model.rope_scaling.factor": (1, math.inf),
    "model.rope_scaling.mscale": (0, 1000),
    "model.rope_scaling.mscale_all_dim": (0, 1000),
    "model.rope_scaling.original_max_position_embeddings": (1, LARGEST),
    "model.vocab_size": (1, LARGEST),
    "data.sequence_length": (1, LARGEST),
    "data.micro_batch_size": (1, LARGEST),
    "train.learning_rate": (0, math.inf),
    "train.weight_decay": (0, math.inf),
    "train.adam_beta1": (0, 1),
    "train.adam_beta2": (0, 1),
    "train.adam_eps": (0, math.inf),
    "policy.last_layers_bf16": (0, LARGEST),
    "policy.first_layers_bf16": (0, LARGEST),
    "policy.amax_history_len": (1, 65_536),
    "policy.margin": (-127, 127),
    "trainer.accumulate_grad_batches": (1, 100_000),
    "trainer.gradient_clip_val": (0, math.inf),
    "trainer.checkpoint_every": (1, 1_000_000),
    "check.parity_steps": (3, 1000),
    "check.gradient_parity_every": (1, LARGEST),
}
"""Least and largest value of each number; ``OPEN`` ones must lie strictly inside."""

OPEN = {
    "model.rms_norm_eps",
    "model.initializer_range",
    "model.routed_scaling_factor",
    "model.rope_theta",
    "train.learning_rate",
    "train.adam_beta1",
    "train.adam_beta2",
    "train.adam_eps",
    "trainer.gradient_clip_val",
}


def problems(config: RunConfig, checks: Sequence[str]) -> list[str]:
    """Every reason for which this request could run nowhere. ``checks`` are the names ``--check.skip`` may hold."""
    found = words_and_ranges(config, checks)
    return found or [*_attention(config), *_experts(config), *_layers(config), *_regions(config), *_baseline(config)]


def _baseline(config: RunConfig) -> Iterator[str]:
    if config.require_baseline and config.baseline is None:
        yield "--require-baseline: name the file that is required, with --baseline FILE"


def words_and_ranges(config: RunConfig, checks: Sequence[str]) -> list[str]:
    """Those of ``problems`` that concern one option alone: unknown words, numbers out of range, unknown names."""
    return [*_words(config), *_ranges(config), *_names(config, checks)]


def _value(config: RunConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _words(config: RunConfig) -> Iterator[str]:
    for path, words in WORDS.items():
        word = _value(config, path)
        if word not in words:
            yield f"--{path} {word}: legal are {', '.join(words)}; the nearest is {nearest(word, words)}"


def _ranges(config: RunConfig) -> Iterator[str]:
    for path, (least, most) in RANGES.items():
        value = _value(config, path)
        if value is None:
            continue
        if path in OPEN:
            if not least < value < most:
                yield f"--{path} {value}: must be more than {least} and less than {most}"
        elif not (least <= value <= most and value < math.inf):
            bound = f"at most {most}" if value > most else "finite" if value == math.inf else f"at least {least}"
            yield f"--{path} {_short(value)}: must be {bound}"


def _short(value: float) -> str:
    """A number, without the inside of one of hundreds of digits."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"


def _names(config: RunConfig, checks: Sequence[str]) -> Iterator[str]:
    if "none" in config.recompute:
        yield "--recompute: none stands alone; leave it out, or name nothing else"
        return
    for flag, names, legal in (("recompute", config.recompute, REGIONS), ("check.skip", config.check.skip, checks)):
        for name in names:
            if name not in legal:
                yield f"--{flag}: no {name!r}; the nearest is {nearest(name, legal)}, legal are {', '.join(legal)}"
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            yield f"--{flag}: {repeated[0]} is named twice; name it once"


def _attention(config: RunConfig) -> Iterator[str]:
    model, data = config.model, config.data
    rope = model.qk_rope_head_dim
    if rope % 2:
        yield f"--model.qk_rope_head_dim {rope}: rotation works on pairs, so it must be even; the nearest is {rope + 1}"
    if data.sequence_length > model.max_position_embeddings:
        yield (
            f"--data.sequence_length {data.sequence_length}: longer than --model.max_position_embeddings; "
            f"the largest is {model.max_position_embeddings}"
        )
    scaling = model.rope_scaling
    if scaling is not None and not 0 < scaling.beta_slow < scaling.beta_fast < math.inf:
        yield (
            f"--model.rope_scaling.beta_slow {scaling.beta_slow}: must be more than 0 and less than "
            f"--model.rope_scaling.beta_fast {scaling.beta_fast}"
        )


def _experts(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.n_routed_experts % model.n_group:
        groups = [n for n in range(1, model.n_routed_experts + 1) if model.n_routed_experts % n == 0]
        close = min(groups, key=lambda n: abs(n - model.n_group))
        yield (
            f"--model.n_group {model.n_group}: does not divide --model.n_routed_experts {model.n_routed_experts}; "
            f"the nearest is {close}"
        )
        return
    if model.topk_group > model.n_group:
        yield (
            f"--model.topk_group {model.topk_group}: more than the groups (--model.n_group); "
            f"the largest is {model.n_group}"
        )
        return
    reachable = model.topk_group * (model.n_routed_experts // model.n_group)
    if model.num_experts_per_tok > reachable:
        yield (
            f"--model.num_experts_per_tok {model.num_experts_per_tok}: a token reaches {reachable} experts "
            f"(--model.topk_group x --model.n_routed_experts / --model.n_group); the largest is {reachable}"
        )


def _layers(config: RunConfig) -> Iterator[str]:
    model, policy = config.model, config.policy
    if model.num_nextn_predict_layers and not model.mtp_loss_weight:
        yield (
            "--model.mtp_loss_weight 0: the multi-token-prediction module would get no gradient; "
            "use --model.num_nextn_predict_layers 0"
        )
    layers, dense = model.num_hidden_layers, model.first_k_dense_replace
    if dense > layers:
        yield f"--model.first_k_dense_replace {dense}: more than --model.num_hidden_layers; the largest is {layers}"
    kept = policy.first_layers_bf16 + (policy.last_layers_bf16 or 0)
    if kept > layers:
        yield (
            f"--policy.first_layers_bf16 {policy.first_layers_bf16} and --policy.last_layers_bf16 "
            f"{policy.last_layers_bf16}: {kept} layers of {layers} (--model.num_hidden_layers)"
        )


def _regions(config: RunConfig) -> Iterator[str]:
    model = config.model
    moe_layers = model.num_hidden_layers - model.first_k_dense_replace + model.num_nextn_predict_layers
    if "mlp" in config.recompute and not model.first_k_dense_replace:
        yield "--recompute mlp: the model has no dense MLP; set --model.first_k_dense_replace to 1 or more"
    if "moe_act" in config.recompute and not moe_layers:
        yield "--recompute moe_act: the model has no experts; lower --model.first_k_dense_replace"


def contradictions(policy: PolicyConfig, precision: str) -> list[str]:
    """Options of the policy that this precision does not have. ``precision`` is the canonical word."""
    found = []
    if precision == "fp8-delayed":
        for flag in ("first_layers_bf16", "last_layers_bf16"):
            if getattr(policy, flag):
                found.append(
                    f"--policy.{flag} {getattr(policy, flag)}: fp8-delayed opens one context around all layers, as in "
                    "Megatron-core, and cannot leave some out; use --precision fp8-tensorwise or --policy.keep_bf16"
                )
    else:
        for flag in ("amax_history_len", "amax_compute_algo", "margin"):
            if getattr(policy, flag) != getattr(PolicyConfig(), flag):
                value = getattr(policy, flag)
                found.append(f"--policy.{flag} {value}: only fp8-delayed has it, not {precision}; leave it out")
    if policy.gradient_format != "auto" and precision in ("bf16", "nvfp4"):
        found.append(
            f"--policy.gradient_format {policy.gradient_format}: {precision} has no FP8 gradients; the nearest is auto"
        )
    return found
