"""The whole model: published parameter counts, forms and layouts against each other, Hugging Face as an oracle."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from smoke.config import ModelConfig, RopeScaling
from smoke.model.deepseek import DeepseekV3, count_parameters
from smoke.model.recompute import Recompute
from smoke.model.routing import record_routing, replay_routing

TINY = ModelConfig(
    vocab_size=40,
    hidden_size=24,
    num_hidden_layers=2,
    intermediate_size=20,
    moe_intermediate_size=10,
    num_attention_heads=3,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=12,
    n_routed_experts=8,
    initializer_range=0.3,
    max_position_embeddings=640,
    rope_scaling=RopeScaling(original_max_position_embeddings=16),
)
PUBLISHED = ModelConfig(
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
)


def rows(count, length, vocab=40):
    text = torch.randint(0, vocab, (count, length), generator=torch.Generator().manual_seed(7))
    labels = F.pad(text[:, 1:], (0, 1), value=-100)
    return {"tokens": text, "labels": labels, "positions": torch.arange(length).repeat(count, 1)}


def pack(*lengths, vocab=40):
    parts = [{name: tensor[0] for name, tensor in rows(1, length, vocab).items()} for length in lengths]
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return batch | {"cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)}


def build(config, layout="sbhd", dtype=torch.float64, **options):
    """The same weights for every form of the same sizes; biases that change the choice of experts."""
    combined = dataclasses.replace(config, attention_form="absorbed", kv_up_projection="combined")
    reference = DeepseekV3(combined, layout=layout, dtype=dtype)
    reference.init_weights(3)
    for router in reference.routers():
        router.expert_bias.copy_(torch.linspace(-0.1, 0.1, config.n_routed_experts))
    model = DeepseekV3(config, layout=layout, dtype=dtype, **options)
    model.load_state_dict(reference.state_dict())
    return model


def loss_of(out):
    """Sum (not mean) of the losses, so that parts of a batch add up."""
    loss = F.cross_entropy(out.logits_TV.to(torch.float64), out.labels_T, reduction="sum")
    if out.mtp_logits_TV is not None:
        mtp = F.cross_entropy(out.mtp_logits_TV.to(torch.float64), out.mtp_labels_T, reduction="sum")
        loss = loss + 0.3 * mtp
    return loss


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, want, tolerance):
    assert got.keys() == want.keys()
    for name, value in got.items():
        error = ((value - want[name]).norm() / want[name].norm().clamp(min=1e-30)).item()
        assert error <= tolerance, f"{name}: relative error {error:.3g} above {tolerance:.3g}"


def test_published_sizes_have_the_published_parameter_counts():
    assert count_parameters(PUBLISHED) == (671_026_404_352, 37_552_282_624)


def test_default_model_trains_a_step_in_bf16_with_a_gradient_for_every_parameter():
    config = ModelConfig()
    model = DeepseekV3(config, layout="sbhd")
    model.init_weights(1)
    out = model(rows(2, 64, vocab=256))
    loss = F.cross_entropy(out.logits_TV.float(), out.labels_T)
    assert abs(loss.item() - torch.tensor(config.vocab_size).log().item()) < 0.1, "untrained: log of the vocabulary"
    (loss + out.aux_loss + F.cross_entropy(out.mtp_logits_TV.float(), out.mtp_labels_T)).backward()
    assert out.logits_TV.dtype is torch.bfloat16
    assert out.aux_loss.dtype is torch.float32
    for name, parameter in model.named_parameters():
        assert parameter.dtype is (torch.float32 if "router" in name else torch.bfloat16), name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    loads = [router.expert_load.clone() for router in model.routers()]
    assert [load.sum().item() for load in loads] == [2 * 64 * config.num_experts_per_tok] * 3
    model.after_optimizer_step()
    for router, load in zip(model.routers(), loads, strict=True):
        assert torch.equal(router.expert_bias, config.bias_update_speed * torch.sign(load.mean() - load))
        assert router.expert_load.sum() == 0


def test_initial_weights_depend_on_the_seed_alone():
    models = [DeepseekV3(TINY, layout="sbhd") for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        state = torch.get_rng_state()
        model.init_weights(seed)
        assert torch.equal(state, torch.get_rng_state()), "the global generator is left alone"
    first, again, other = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    assert (first["layers.0.input_layernorm.weight"] == 1).all()
    assert abs(first["embedding.weight"].float().std().item() / TINY.initializer_range - 1) < 0.1


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_absorbed_equals_plain(layout):
    batch = rows(2, 11) if layout == "sbhd" else pack(9, 1, 12)
    plain = dataclasses.replace(TINY, attention_form="plain")
    results = []
    for config in (TINY, plain, dataclasses.replace(plain, kv_up_projection="split")):
        model = build(config, layout)
        out = model(batch)
        assert out.logits_TV.dtype is out.aux_loss.dtype is torch.float64
        grads = gradients(model, loss_of(out) + out.aux_loss)
        results.append({"logits": out.logits_TV, "mtp": out.mtp_logits_TV, **grads})
    split = {name: value for name, value in results.pop().items() if "_up_proj" not in name}
    assert_same(results[0], results[1], 1e-10)
    assert_same(split, {name: results[1][name] for name in split}, 1e-10)


def test_packed_equals_separate_sequences():
    lengths = (9, 1, 12)
    model, alone = build(TINY, "thd"), build(TINY, "sbhd")
    batch = pack(*lengths)
    out = model(batch)
    parts = [{k: v[None] for k, v in one.items() if k != "cu_seqlens"} for one in (pack(length) for length in lengths)]
    outs = [alone(part) for part in parts]
    torch.testing.assert_close(out.logits_TV, torch.cat([o.logits_TV for o in outs]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out.mtp_logits_TV, torch.cat([o.mtp_logits_TV for o in outs]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out.aux_loss, sum(o.aux_loss for o in outs) / 3, rtol=1e-10, atol=1e-12)
    assert out.mtp_labels_T.tolist() == [label for o in outs for label in o.mtp_labels_T.tolist()]
    together = gradients(model, loss_of(out) + out.aux_loss)
    separate = gradients(alone, sum(loss_of(o) + o.aux_loss / 3 for o in outs))
    assert_same(together, separate, 1e-10)


def test_mtp_reads_the_next_token_only():
    """What the prediction at token i depends on: tokens up to i + 1, through their embeddings."""
    model, batch = build(TINY), rows(1, 10)
    before = model(batch).mtp_logits_TV
    batch["tokens"][0, 6] = batch["labels"][0, 5] = (batch["tokens"][0, 6] + 1) % 40
    changed = ((model(batch).mtp_logits_TV - before).abs() > 1e-9).any(-1)
    assert changed.nonzero().flatten().tolist() == [5, 6, 7, 8, 9]


def test_float64_twin_of_a_bf16_model_by_functional_call():
    model, batch = build(TINY, dtype=torch.bfloat16), rows(2, 11)
    wide = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    with record_routing() as tape:
        low = model(batch).logits_TV
    with replay_routing(tape):
        high = torch.func.functional_call(model, wide, (batch,)).logits_TV
    same = DeepseekV3(TINY, layout="sbhd", dtype=torch.float64)
    same.load_state_dict(model.state_dict())
    with replay_routing(tape):
        assert torch.equal(same(batch).logits_TV, high)
    assert high.dtype is torch.float64
    error = ((low.double() - high).norm() / high.norm()).item()
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_recompute_of_every_region_changes_no_bit(layout):
    batch = rows(2, 11) if layout == "sbhd" else pack(9, 1, 12)
    results, held = [], []
    for regions in ((), ("mla_up_proj",), ("mla_up_proj", "layernorm", "moe_act", "mlp", "core_attn")):
        recompute = Recompute(regions)
        model = build(TINY, layout, torch.bfloat16, recompute=recompute, expert_row_multiple=4)
        out = model(batch)
        held.append(recompute.ledger.held_with_recompute_bytes if regions else recompute.ledger.held_bytes)
        results.append({"logits": out.logits_TV.detach(), **gradients(model, loss_of(out) + out.aux_loss)})
        assert set(recompute.replays) == set(regions)
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name
    assert held[0] > held[1] > held[2]


def test_gradient_slices_cover_the_rows_they_name():
    config = dataclasses.replace(TINY, num_hidden_layers=1)
    model = DeepseekV3(config, layout="sbhd", device="meta")
    slices, sizes = model.gradient_slices(), {name: p.shape[0] for name, p in model.named_parameters()}
    attention = "layers.0.self_attention."
    assert slices[f"{attention}linear_q_up_proj.weight"] == [("head 0", 0, 16), ("head 1", 16, 32), ("head 2", 32, 48)]
    assert slices[f"{attention}linear_kv_down_proj.weight"] == [("latent", 0, 16), ("rope", 16, 22)]
    assert len(slices) == 6, "query up, K/V up and K/V down of the layer and of the prediction module"
    for name, parts in slices.items():
        edges = [0, *(end for _, _, end in parts)]
        assert [start for _, start, _ in parts] == edges[:-1]
        assert edges[-1] == sizes[name]
    split = dataclasses.replace(config, kv_up_projection="split", q_lora_rank=None, num_nextn_predict_layers=0)
    names = DeepseekV3(split, layout="sbhd", device="meta").gradient_slices().keys()
    assert {name.removeprefix(attention) for name in names} == {
        f"linear_{part}.weight" for part in ("q_proj", "kv_down_proj", "k_up_proj", "v_up_proj")
    }


def hugging_face_twin(model):
    """transformers' model of the same sizes, and (its parameter, slice of it, our name) for every parameter of ours."""
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

    sizes = dataclasses.asdict(model.config)
    scaling = sizes.pop("rope_scaling")
    rope = {"rope_type": "yarn", "rope_theta": sizes.pop("rope_theta"), **scaling}
    for ours in ("attention_form", "kv_up_projection", "attention", "aux_loss_alpha", "bias_update_speed"):
        sizes.pop(ours)
    for ours in ("mtp_loss_weight", "num_nextn_predict_layers"):
        sizes.pop(ours)
    config = DeepseekV3Config(
        **sizes,
        num_key_value_heads=model.config.num_attention_heads,
        rope_parameters=rope,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    with torch.random.fork_rng():
        twin = DeepseekV3ForCausalLM(config)
    return twin, list(pairs(model, dict(twin.named_parameters())))


ATTENTION = {
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "q_proj": "linear_q_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}


def pairs(model, theirs):
    yield "model.embed_tokens.weight", slice(None), "embedding.weight"
    yield "model.norm.weight", slice(None), "final_layernorm.weight"
    yield "lm_head.weight", slice(None), "output_layer.weight"
    for layer in range(model.config.num_hidden_layers):
        left, right = f"model.layers.{layer}.", f"layers.{layer}."
        yield f"{left}input_layernorm.weight", slice(None), f"{right}input_layernorm.weight"
        yield f"{left}post_attention_layernorm.weight", slice(None), f"{right}pre_mlp_layernorm.weight"
        for their_name, our_name in ATTENTION.items():
            if f"{left}self_attn.{their_name}.weight" in theirs:
                yield f"{left}self_attn.{their_name}.weight", slice(None), f"{right}self_attention.{our_name}.weight"
        dense = layer < model.config.first_k_dense_replace
        left_mlp, right_mlp = ("mlp.", "mlp.") if dense else ("mlp.shared_experts.", "mlp.shared_experts.")
        inner = model.config.intermediate_size if dense else model.config.moe_intermediate_size
        yield f"{left}{left_mlp}gate_proj.weight", slice(0, inner), f"{right}{right_mlp}linear_fc1.weight"
        yield f"{left}{left_mlp}up_proj.weight", slice(inner, None), f"{right}{right_mlp}linear_fc1.weight"
        yield f"{left}{left_mlp}down_proj.weight", slice(None), f"{right}{right_mlp}linear_fc2.weight"
        if not dense:
            yield f"{left}mlp.gate.weight", slice(None), f"{right}mlp.router.weight"
            for expert in range(model.config.n_routed_experts):
                yield f"{left}mlp.experts.gate_up_proj", expert, f"{right}mlp.experts.linear_fc1.weight{expert}"
                yield f"{left}mlp.experts.down_proj", expert, f"{right}mlp.experts.linear_fc2.weight{expert}"


@pytest.mark.parametrize("q_lora_rank", [20, None])
def test_hugging_face_gives_the_same_logits_and_gradients(q_lora_rank):
    config = dataclasses.replace(TINY, q_lora_rank=q_lora_rank, num_nextn_predict_layers=0)
    model, batch = build(config, dtype=torch.float32), rows(2, 30)
    twin, mapping = hugging_face_twin(model)
    ours, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    assert {name for name, _, _ in mapping} == theirs.keys()
    assert {name for _, _, name in mapping} == ours.keys()

    def view(name, rows_or_expert, our_name, grad):
        left, right = theirs[name], ours[our_name]
        left, right = (left.grad, right.grad) if grad else (left.data, right.data)
        if isinstance(rows_or_expert, int):
            return left[rows_or_expert], right
        return left, right[rows_or_expert]

    for entry in mapping:
        left, right = view(*entry, grad=False)
        left.copy_(right)
    for layer, router in enumerate(model.routers(), start=config.first_k_dense_replace):
        twin.model.layers[layer].mlp.gate.e_score_correction_bias.copy_(router.expert_bias)
    out = model(batch)
    their_logits = twin(input_ids=batch["tokens"], use_cache=False).logits.flatten(0, 1)
    torch.testing.assert_close(out.logits_TV, their_logits, rtol=2e-4, atol=2e-4 * their_logits.abs().max().item())
    F.cross_entropy(out.logits_TV, out.labels_T, reduction="sum").backward()
    F.cross_entropy(their_logits, out.labels_T, reduction="sum").backward()
    for entry in mapping:
        left, right = view(*entry, grad=True)
        right = torch.zeros_like(left) if right is None else right
        error = ((left - right).norm() / left.norm().clamp(min=1e-6)).item()
        assert error < 2e-3, f"gradient of {entry[2]}: relative error {error:.3g}"
