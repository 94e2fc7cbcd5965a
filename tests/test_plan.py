"""The plan: every auto decided with a reason, every refusal with its exit code, the required checks."""

from __future__ import annotations

import dataclasses
import math

import pytest

from smoke import shapes
from smoke.config import PRECISIONS, CheckConfig, DataConfig, ModelConfig, RopeScaling, RunConfig
from smoke.environment import Device, Environment
from smoke.plan import Plan, Refusal, resolve
from smoke.requirements import CHECKS

CPU = Environment(
    python="3.11.7",
    platform="Linux",
    cpu_name="a CPU",
    cpu_flags=("avx2", "fma"),
    cpu_count=2,
    memory_bytes=16 * 2**30,
    packages={"torch": "2.13.0", "triton": "3.9.0"},
)
HOPPER = dataclasses.replace(
    CPU,
    packages={**CPU.packages, "transformer-engine": "2.20.2"},
    cuda_version="13.0",
    devices=(Device(name="NVIDIA H200", capability=(9, 0), memory_bytes=140 * 2**30),),
    transformer_engine={"mxfp8": "compute capability 10.0 or higher is required", "fp8-tensorwise": ""},
)


def asked(**options) -> RunConfig:
    """A configuration from flat options and dotted ones (``model__hidden_size``)."""
    config = RunConfig()
    for name, value in options.items():
        group, _, leaf = name.rpartition("__")
        if group:
            config = dataclasses.replace(
                config, **{group: dataclasses.replace(getattr(config, group), **{leaf: value})}
            )
        else:
            config = dataclasses.replace(config, **{leaf: value})
    return config


def reason(plan: Plan, choice: str) -> str:
    return next(c.reason for c in plan.choices if c.choice == choice)


def refusal(environment: Environment = CPU, **options) -> Refusal:
    with pytest.raises(Refusal) as caught:
        resolve(asked(**options), environment)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_the_default_run_is_legal_in_every_recipe(precision, layout):
    plan = resolve(asked(precision=precision, layout=layout, recompute=("mla_up_proj",)), CPU)
    assert (plan.device, plan.impl) == ("cpu", "reference")
    assert plan.backend == ("none" if precision == "bf16" else "emulated")
    assert plan.numerics == ("bf16" if precision == "bf16" else "emulated")
    assert plan.recipe.name == plan.config.precision == precision
    assert all(choice.reason for choice in plan.choices)
    assert "auto" not in {choice.value for choice in plan.choices}
    assert set(plan.required) | set(plan.skipped) == set(CHECKS)


def test_resolve_is_pure():
    assert resolve(asked(), CPU) == resolve(asked(), CPU)


def test_a_synonym_becomes_the_canonical_word():
    assert resolve(asked(precision="fp8-current"), CPU).config.precision == "fp8-tensorwise"


def test_an_unknown_precision_names_the_nearest():
    refused = refusal(precision="mxfp9")
    assert refused.exit_code == 2
    assert "mxfp8" in refused.message


def test_auto_on_a_gpu_takes_triton_and_says_why_the_numbers_are_emulated():
    plan = resolve(asked(precision="mxfp8"), HOPPER)
    assert (plan.device, plan.impl, plan.backend) == ("cuda", "triton", "emulated")
    assert "10.0 or higher" in reason(plan, "backend")
    plan = resolve(asked(precision="fp8-tensorwise"), HOPPER)
    assert "does not drive Transformer Engine yet" in reason(plan, "backend")
    without = dataclasses.replace(HOPPER, packages={"torch": "2.13.0"})
    assert resolve(asked(), without).impl == "reference"
    assert "transformer-engine is not installed" in reason(resolve(asked(), without), "backend")


def test_a_cpu_with_bf16_instructions_multiplies_in_bf16():
    values = {c.choice: c.value for c in resolve(asked(), dataclasses.replace(CPU, cpu_flags=("amx_bf16",))).choices}
    assert values["products"] == "bf16"
    assert {c.choice: c.value for c in resolve(asked(), CPU).choices}["products"] == "float32"


@pytest.mark.parametrize(
    ("environment", "precision", "device", "named"),
    [
        (CPU, "mxfp8", "auto", "transformer-engine is not installed"),
        (HOPPER, "mxfp8", "auto", "10.0 or higher"),
        (HOPPER, "fp8-tensorwise", "auto", "does not drive Transformer Engine yet"),
        (HOPPER, "fp8-tensorwise", "cpu", "needs a CUDA device"),
        (dataclasses.replace(HOPPER, devices=()), "mxfp8", "auto", "needs a CUDA device"),
    ],
)
def test_backend_te_is_refused_with_what_blocks_it(environment, precision, device, named):
    refused = refusal(environment, backend="te", precision=precision, device=device)
    assert (refused.exit_code, refused.verdict) == (4, "unsupported")
    assert named in refused.message
    assert "--backend emulated works" in refused.message


@pytest.mark.parametrize(
    ("environment", "options", "named"),
    [
        (CPU, {"device": "cuda"}, "--device cuda"),
        (CPU, {"impl": "triton"}, "--impl triton"),
        (dataclasses.replace(HOPPER, packages={"torch": "2.13.0"}), {"impl": "triton"}, "triton is not installed"),
        (CPU, {"model__hidden_size": 2**18}, "GiB"),
        (CPU, {"steps": 1_000_000, "data__source": "generated"}, "1,000,000 batches need at least"),
    ],
)
def test_what_this_machine_lacks_is_exit_4(environment, options, named):
    refused = refusal(environment, **options)
    assert refused.exit_code == 4
    assert named in refused.message


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model__qk_rope_head_dim": 7}, "--model.qk_rope_head_dim 7"),
        ({"model__n_group": 3}, "nearest is 2"),
        ({"model__topk_group": 3}, "--model.topk_group 3: more than the groups (--model.n_group); the largest is 2"),
        ({"model__rope_scaling": RopeScaling(mscale=math.nan)}, "--model.rope_scaling.mscale nan"),
        ({"model__rope_scaling": RopeScaling(mscale_all_dim=math.inf)}, "--model.rope_scaling.mscale_all_dim inf"),
        ({"model__hidden_size": 10**400}, "(401 digits): must be at most"),
        ({"data__micro_batch_size": 10**400}, "(401 digits): must be at most"),
        ({"model__mtp_loss_weight": 0.0}, "--model.num_nextn_predict_layers 0"),
        ({"seed": 10**400}, "must be at most 4294967295"),
        ({"recompute": ("none", "mlp")}, "none stands alone"),
        ({"recompute": ("MLP",)}, "the nearest is mlp"),
        ({"model__num_experts_per_tok": 5}, "largest is 4"),
        ({"model__first_k_dense_replace": 4}, "largest is 3"),
        ({"model__vocab_size": 256}, "--model.vocab_size 256"),
        ({"model__num_nextn_predict_layers": 2}, "at most 1"),
        ({"model__q_lora_rank": 0}, "--model.q_lora_rank 0"),
        ({"model__attention_form": "absorbd"}, "nearest is absorbed"),
        ({"model__rope_scaling": RopeScaling(beta_fast=1.0, beta_slow=32.0)}, "beta_slow"),
        ({"model__hidden_size": 2**40}, "more than any single machine"),
        ({"data__sequence_length": 1}, "--data.sequence_length 1"),
        ({"data__sequence_length": 2**18}, "largest is 163840"),
        ({"data__micro_batch_size": 0}, "--data.micro_batch_size 0"),
        ({"data__source": "text:/missing"}, "/missing"),
        ({"data__source": "prse"}, "prose"),
        ({"steps": 0}, "--steps 0"),
        ({"seed": -1}, "--seed -1"),
        ({"check__parity_steps": 2}, "at least 3"),
        ({"check__skip": ("memry",)}, "nearest is memory"),
        ({"recompute": ("mla_up",)}, "nearest is mla_up_proj"),
        ({"recompute": ("mlp", "mlp")}, "twice"),
        ({"recompute": ("mlp",), "model__first_k_dense_replace": 0}, "no dense MLP"),
        (
            {"recompute": ("moe_act",), "model__first_k_dense_replace": 3, "model__num_nextn_predict_layers": 0},
            "no experts",
        ),
        ({"backend": "emulate"}, "nearest is emulated"),
        ({"layout": "bshd"}, "nearest is sbhd"),
        ({"device": "gpu"}, "--device gpu"),
        ({"precision": "fp8-delayed", "policy__last_layers_bf16": 1}, "--policy.last_layers_bf16 1"),
        ({"precision": "fp8-delayed", "policy__first_layers_bf16": 1}, "--policy.first_layers_bf16 1"),
        ({"policy__margin": 1}, "only fp8-delayed"),
        ({"precision": "nvfp4", "policy__gradient_format": "e5m2"}, "--policy.gradient_format e5m2"),
        ({"policy__keep_bf16": ("layers.9.*",)}, "layers.9.*"),
        ({"policy__keep_bf16": ("*",)}, "nothing is left"),
        ({"policy__first_layers_bf16": 2, "policy__last_layers_bf16": 2}, "4 layers of 3"),
        ({"train__learning_rate": 0.0}, "--train.learning_rate 0.0"),
        ({"train__adam_beta2": 1.0}, "--train.adam_beta2 1.0"),
    ],
)
def test_what_no_machine_can_run_is_exit_2(options, named):
    refused = refusal(**options)
    assert (refused.exit_code, refused.verdict) == (2, "error")
    assert named in refused.message


@pytest.mark.parametrize(
    ("options", "field", "nearest"),
    [
        ({"model__hidden_size": 240}, "--model.hidden_size = 240", 256),
        ({"model__q_lora_rank": 100}, "--model.q_lora_rank = 100", 96),
        ({"model__kv_lora_rank": 72}, "--model.kv_lora_rank + --model.qk_rope_head_dim = 104", 96),
        ({"model__v_head_dim": 12}, "--model.num_attention_heads x --model.v_head_dim = 48", 64),
        ({"model__intermediate_size": 500}, "--model.intermediate_size = 500", 512),
        ({"model__moe_intermediate_size": 40}, "--model.moe_intermediate_size = 40", 32),
        ({"data__sequence_length": 255, "data__micro_batch_size": 1}, "--data.sequence_length = 255", 256),
    ],
)
def test_a_size_that_mxfp8_cannot_take_names_itself_and_the_nearest(options, field, nearest):
    refused = refusal(precision="mxfp8", **options)
    assert refused.exit_code == 2
    assert field in refused.message
    assert f"multiples of 32, the nearest is {nearest}" in refused.message


def test_bf16_takes_odd_sizes_and_the_absorbed_products_count_only_when_quantized():
    odd = {"model__hidden_size": 241, "model__q_lora_rank": 99, "model__v_head_dim": 7, "data__sequence_length": 33}
    assert resolve(asked(precision="bf16", **odd), CPU).numerics == "bf16"
    narrow = {"model__qk_nope_head_dim": 16, "model__qk_rope_head_dim": 16}
    assert resolve(asked(precision="mxfp8", **narrow, model__kv_lora_rank=48), CPU)
    refused = refusal(precision="mxfp8", **narrow, model__kv_lora_rank=48, policy__absorbed_kv="recipe")
    assert "--model.qk_nope_head_dim = 16" in refused.message


def test_several_problems_are_named_in_one_line():
    message = refusal(steps=0, seed=-1).message
    assert message.startswith("--steps 0")
    assert "--seed" in message


def test_required_checks_follow_the_request():
    full = resolve(asked(precision="nvfp4", layout="thd", recompute=("mla_up_proj",), baseline="b.json"), CPU)
    assert full.required == CHECKS
    assert full.skipped == {}
    bare = resolve(asked(precision="bf16", steps=2), CPU)
    assert set(CHECKS) - set(bare.required) == set(bare.skipped)
    assert set(bare.skipped) == {
        "quantizer",
        "quantization_engaged",
        "recompute_parity",
        "memory",
        "packed_parity",
        "loss_tracking",
        "throughput",
        "weight_freshness",
        "resume_parity",
        "baseline",
    }
    assert "--steps 10" in bare.skipped["loss_tracking"]


def test_gradients_are_not_judged_before_the_recipe_has_scales():
    judged = {"gradient_parity", "quantization_engaged", "gradient_presence"}
    short = resolve(asked(precision="fp8-delayed", steps=5), CPU)
    assert judged <= set(short.skipped)
    assert "--steps 6" in short.skipped["gradient_parity"]
    assert judged <= set(resolve(asked(precision="fp8-delayed", steps=6), CPU).required)
    assert judged <= set(resolve(asked(precision="mxfp8", steps=1), CPU).required)


def test_a_skipped_check_stays_required():
    plan = resolve(asked(check__skip=("finite",)), CPU)
    assert "finite" in plan.required
    assert plan.skipped["finite"] == "--check.skip"


V3 = ModelConfig(
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    num_nextn_predict_layers=0,
)


def test_the_published_sizes_give_the_published_count():
    assert shapes.parameter_count(V3) == 671_026_404_352
    assert shapes.least_bytes(V3, DataConfig()) > 16 * 671e9


def test_the_bitwise_checks_count_in_the_memory_a_run_needs():
    """A model whose training fits and whose trajectories do not is refused before anything is allocated."""
    model = ModelConfig(hidden_size=4096, vocab_size=65536, intermediate_size=4096, moe_intermediate_size=512)
    count = shapes.parameter_count(model)
    here = dataclasses.replace(CPU, memory_bytes=count * 40)
    asked = RunConfig(model=model, recompute=("mlp",))
    with pytest.raises(Refusal) as caught:
        resolve(asked, here)
    assert caught.value.exit_code == 4
    assert f"{count:,} parameters" in caught.value.message
    skip = CheckConfig(skip=("recompute_parity", "determinism", "memory"))
    assert resolve(dataclasses.replace(asked, check=skip), here)
    longer = dataclasses.replace(asked, check=CheckConfig(parity_steps=6))
    with pytest.raises(Refusal):
        resolve(longer, dataclasses.replace(CPU, memory_bytes=count * 60))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None, "kv_up_projection": "split"},
        {"attention_form": "plain", "n_shared_experts": 2, "num_nextn_predict_layers": 0},
        {"attention_form": "plain", "kv_up_projection": "split", "n_shared_experts": 0, "first_k_dense_replace": 0},
    ],
)
def test_the_gemms_on_paper_are_those_of_the_model(changes):
    from smoke.model.deepseek import DeepseekV3
    from smoke.model.linear import GroupedLinear, HeadwiseLinear, Linear

    config = dataclasses.replace(ModelConfig(), **changes)
    model = DeepseekV3(config, layout="sbhd", device="meta")
    built = {
        name: (leaf.in_features, leaf.out_features, getattr(leaf, "num_groups", 1), isinstance(leaf, HeadwiseLinear))
        for name, leaf in model.named_modules()
        if isinstance(leaf, (Linear, GroupedLinear, HeadwiseLinear))
    }
    paper = {n: (g.inputs.value, g.outputs.value, g.copies, g.absorbed) for n, g in shapes.gemms(config).items()}
    assert paper == built
    assert shapes.parameter_count(config) == sum(p.numel() for p in model.parameters())


def test_a_refusal_is_one_line_whatever_was_asked():
    refused = refusal(data__source="text:a\nb\x1b[31m")
    assert "text:a\\nb\\x1b[31m" in refused.message
