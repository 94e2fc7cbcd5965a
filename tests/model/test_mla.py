"""Absorbed against plain attention, packed against separate sequences, state dicts, and what core attention saves."""

import dataclasses
import itertools

import pytest
import torch

from smoke.config import ModelConfig
from smoke.model.attention import Sequences, attention_dtype, core_attention
from smoke.model.mla import MLASelfAttention
from smoke.model.recompute import Recompute
from smoke.model.rope import rope_table

BASE = ModelConfig(
    hidden_size=24,
    num_attention_heads=3,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=12,
    max_position_embeddings=64,
)


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def sequences_of(layout, lengths):
    """sbhd needs equal lengths; the batch goes through the same door as a real one."""
    if layout == "sbhd":
        return Sequences.of({"positions": torch.arange(lengths[0]).repeat(len(lengths), 1)}, "sbhd")
    positions = torch.cat([torch.arange(length) for length in lengths])
    edges = [0, *itertools.accumulate(lengths)]
    return Sequences.of({"positions": positions, "cu_seqlens": torch.tensor(edges, dtype=torch.int32)}, "thd")


def build(config, recompute=None, dtype=torch.float64):
    """Weights that make every term matter, the same for every form of the same sizes."""
    reference = MLASelfAttention(
        dataclasses.replace(config, attention_form="absorbed", kv_up_projection="combined"), dtype=dtype
    )
    for index, parameter in enumerate(reference.parameters()):
        scale = 0.5 if parameter.dim() == 1 else 1.5 / parameter.shape[1] ** 0.5
        parameter.data.copy_((parameter.dim() == 1) + scale * draw(*parameter.shape, seed=index))
    module = MLASelfAttention(config, recompute=recompute, dtype=dtype)
    module.load_state_dict(reference.state_dict())
    return module


def run(module, hidden, sequences):
    """Output, and gradients of the input and of the Parameters by name (split ones joined as the combined one is)."""
    hidden = hidden.clone().requires_grad_()
    out = module(hidden, sequences, *rope_table(module.config, hidden.device))
    out.backward(draw(*out.shape, seed=5, dtype=out.dtype))
    found = {"out": out.detach(), "hidden": hidden.grad}
    found |= {name: parameter.grad for name, parameter in module.named_parameters()}
    if module.config.kv_up_projection == "split":
        halves = [found.pop(f"linear_{half}_up_proj.weight").unflatten(0, (module.heads, -1)) for half in "kv"]
        found["linear_kv_up_proj.weight"] = torch.cat(halves, dim=1).flatten(0, 1)
    return found


def assert_same(got, want, tolerance):
    assert got.keys() == want.keys()
    for name, value in got.items():
        error = ((value - want[name]).norm() / want[name].norm()).item()
        assert error <= tolerance, f"{name}: relative error {error:.3g} above {tolerance:.3g}"


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
@pytest.mark.parametrize("kv_up", ["combined", "split"])
@pytest.mark.parametrize("q_lora_rank", [20, None])
@pytest.mark.parametrize("heads", [1, 3, 5])
def test_absorbed_equals_plain_with_gradients(heads, q_lora_rank, kv_up, layout):
    config = dataclasses.replace(BASE, num_attention_heads=heads, q_lora_rank=q_lora_rank, kv_up_projection=kv_up)
    sequences = sequences_of(layout, (7, 7) if layout == "sbhd" else (1, 8, 5))
    hidden = draw(14, 24)
    plain = dataclasses.replace(config, attention_form="plain", kv_up_projection="combined")
    assert_same(run(build(config), hidden, sequences), run(build(plain), hidden, sequences), 1e-12)


def test_plain_split_equals_plain_combined():
    config = dataclasses.replace(BASE, attention_form="plain")
    split = dataclasses.replace(config, kv_up_projection="split")
    sequences, hidden = sequences_of("sbhd", (7, 7)), draw(14, 24)
    assert_same(run(build(split), hidden, sequences), run(build(config), hidden, sequences), 1e-12)


@pytest.mark.parametrize("v_head_dim", [4, 16, 30])
def test_value_width_is_free_in_the_plain_form(v_head_dim):
    config = dataclasses.replace(BASE, v_head_dim=v_head_dim)
    plain = dataclasses.replace(config, attention_form="plain")
    sequences, hidden = sequences_of("sbhd", (7, 7)), draw(14, 24)
    assert_same(run(build(config), hidden, sequences), run(build(plain), hidden, sequences), 1e-12)


@pytest.mark.parametrize("form", ["absorbed", "plain"])
def test_packed_equals_separate_sequences(form):
    module = build(dataclasses.replace(BASE, attention_form=form))
    lengths, hidden = (4, 1, 9), draw(14, 24)
    packed = run(module, hidden, sequences_of("thd", lengths))
    module.zero_grad()
    tables = rope_table(module.config, hidden.device)
    outs, upstream = [], draw(14, 24, seed=5)
    for part, weight in zip(hidden.split(lengths), upstream.split(lengths), strict=True):
        out = module(part, sequences_of("sbhd", (part.shape[0],)), *tables)
        out.backward(weight)
        outs.append(out.detach())
    torch.testing.assert_close(packed.pop("out"), torch.cat(outs), rtol=1e-12, atol=1e-12)
    packed.pop("hidden")
    assert_same(packed, {name: parameter.grad for name, parameter in module.named_parameters()}, 1e-12)


@pytest.mark.parametrize("form", ["absorbed", "plain"])
def test_a_token_reaches_only_later_tokens_of_its_own_sequence(form):
    module = build(dataclasses.replace(BASE, attention_form=form))
    hidden, sequences = draw(14, 24), sequences_of("thd", (4, 6, 4))
    tables = rope_table(module.config, hidden.device)
    before = module(hidden, sequences, *tables)
    hidden[6] += 1.0
    changed = (module(hidden, sequences, *tables) != before).any(-1)
    assert changed.nonzero().flatten().tolist() == [6, 7, 8, 9]


def test_core_attention_matches_softmax():
    query, key, value = draw(10, 3, 8), draw(10, 1, 8, seed=1), draw(10, 1, 8, seed=2)
    got = core_attention(
        query, key, value, sequences=sequences_of("sbhd", (5, 5)), scale=0.3, columns=6, out_dtype=torch.float64
    )
    for row in range(2):
        part = slice(5 * row, 5 * row + 5)
        scores = torch.einsum("snd,tnd->nst", query[part], key[part].expand(-1, 3, -1)) * 0.3
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        want = torch.einsum("nst,tnd->snd", scores.softmax(-1), value[part].expand(-1, 3, -1))[..., :6]
        torch.testing.assert_close(got[part], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
@pytest.mark.parametrize("form", ["absorbed", "plain"])
def test_core_attention_saves_the_regions_outputs_and_no_probabilities(form, layout):
    """The flash form: storages of query, key and value are those handed in; nothing of size S x S is kept."""
    length, heads, width = 48, 3, 32
    key_heads = 1 if form == "absorbed" else heads
    inputs = [draw(2 * length, heads, width, dtype=torch.bfloat16)]
    inputs += [draw(2 * length, key_heads, width, seed=i, dtype=torch.bfloat16) for i in range(1 + (form == "plain"))]
    dtype = attention_dtype(inputs[0])
    inputs = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    sequences = sequences_of(layout, (length, length) if layout == "sbhd" else (length + 20, length - 20))
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = core_attention(*inputs, sequences=sequences, scale=0.2, columns=24, out_dtype=torch.bfloat16)
    assert out.dtype is torch.bfloat16
    assert out.shape == (2 * length, heads, 24)
    storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    kept = {tensor.untyped_storage().data_ptr(): tensor for tensor in saved}
    assert storages <= kept.keys(), "query, key and value are saved as views, not copies"
    others = [tensor for pointer, tensor in kept.items() if pointer not in storages]
    tokens_heads = 2 * length * heads
    assert sum(tensor.numel() for tensor in others) <= tokens_heads * (width + 1) + 16, "only output and logsumexp"


def test_region_hands_attention_the_very_tensors_it_saves():
    """With mla_up_proj recomputed, attention keeps neither query nor key, and no bit of any gradient changes."""
    config = dataclasses.replace(BASE, hidden_size=32)
    results, held = [], []
    for regions in ((), ("mla_up_proj",), ("core_attn",), ("mla_up_proj", "core_attn")):
        recompute = Recompute(regions)
        module = build(config, recompute, dtype=torch.bfloat16)
        with recompute.tracking(list(module.parameters())) as ledger:
            hidden = draw(30, 32, dtype=torch.bfloat16).requires_grad_()
            tables = rope_table(config, hidden.device)
            out = module(hidden, sequences_of("thd", (11, 19)), *tables)
        out.backward(draw(30, 32, seed=5, dtype=torch.bfloat16))
        results.append({"out": out, "hidden": hidden.grad} | {n: p.grad for n, p in module.named_parameters()})
        held.append(ledger.held_with_recompute_bytes if regions else ledger.held_bytes)
        assert recompute.replays == dict.fromkeys(regions, 1)
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name
    joined_bytes = 30 * (config.num_attention_heads + 1) * (config.kv_lora_rank + config.qk_rope_head_dim) * 2
    assert held[0] - held[1] >= joined_bytes
    assert held[3] < min(held[:3])


@pytest.mark.parametrize("form", ["absorbed", "plain"])
def test_state_dicts_of_combined_and_split_load_into_each_other(form):
    combined = build(dataclasses.replace(BASE, attention_form=form))
    split = MLASelfAttention(dataclasses.replace(BASE, attention_form=form, kv_up_projection="split"))
    assert "linear_kv_up_proj.weight" not in split.state_dict()
    split.to(torch.float64).load_state_dict(combined.state_dict())
    for left, right in zip(combined.kv_up_weights(), split.kv_up_weights(), strict=True):
        assert torch.equal(left, right)
    heads, nope = BASE.num_attention_heads, BASE.qk_nope_head_dim
    rows = combined.linear_kv_up_proj.weight.unflatten(0, (heads, -1))
    assert torch.equal(split.linear_k_up_proj.weight, rows[:, :nope].flatten(0, 1))
    back = MLASelfAttention(dataclasses.replace(BASE, attention_form=form), dtype=torch.float64)
    back.load_state_dict(split.state_dict())
    assert torch.equal(back.linear_kv_up_proj.weight, combined.linear_kv_up_proj.weight)


def test_cu_seqlens_that_do_not_cover_the_pack_are_refused():
    positions = torch.arange(6)
    for edges in ([0, 3], [1, 6], [0, 3, 3, 6]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            Sequences.of({"positions": positions, "cu_seqlens": torch.tensor(edges, dtype=torch.int32)}, "thd")
