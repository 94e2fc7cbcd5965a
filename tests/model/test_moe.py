"""Router against a plain loop, dispatch and experts against a loop over tokens, load, bias, tape."""

import dataclasses

import pytest
import torch

from smoke.config import ModelConfig
from smoke.model.attention import Sequences
from smoke.model.moe import Experts, MoELayer, collect, plan_dispatch, spread
from smoke.model.recompute import Recompute
from smoke.model.routing import Router, choose_experts, record_routing, replay_routing

CONFIG = ModelConfig(
    hidden_size=12,
    moe_intermediate_size=10,
    n_routed_experts=12,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    aux_loss_alpha=0.1,
)


def packed(*lengths):
    return Sequences(lengths, torch.cat([torch.arange(length) for length in lengths]))


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def fill(module, scale=0.5):
    for index, parameter in enumerate(module.parameters()):
        parameter.data.copy_(draw(*parameter.shape, seed=index) * scale)
    return module


def loop_choice(scores, config):
    """The best experts of the best groups for one token; equal scores go to the lower number."""
    size = config.n_routed_experts // config.n_group
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.n_group)]
    worth = [sum(sorted((scores[e] for e in group), reverse=True)[:2]) for group in groups]
    kept = sorted(range(config.n_group), key=lambda g: (-worth[g], g))[: config.topk_group]
    allowed = [e for g in kept for e in groups[g]]
    return sorted(allowed, key=lambda e: (-scores[e], e))[: config.num_experts_per_tok]


def loop_router(x, weight, bias, lengths, config):
    """Choices, weights and auxiliary loss, token by token, in float64."""
    scores = (x @ weight.mT).sigmoid()
    choices = [loop_choice((row + bias).tolist(), config) for row in scores]
    weights = []
    for row, chosen in zip(scores, choices, strict=True):
        picked = torch.stack([row[e] for e in chosen])
        picked = picked / picked.sum() if config.norm_topk_prob else picked
        weights.append(picked * config.routed_scaling_factor)
    best = [
        sorted(range(len(row)), key=lambda e, row=row: -row[e].item())[: config.num_experts_per_tok] for row in scores
    ]
    losses, start = [], 0
    for length in lengths:
        span = range(start, start + length)
        loss = 0.0
        for expert in range(config.n_routed_experts):
            count = sum(expert in best[t] for t in span)
            share = config.n_routed_experts / (config.num_experts_per_tok * length) * count
            loss = loss + share * sum(scores[t, expert] / scores[t].sum() for t in span) / length
        losses.append(loss)
        start += length
    return choices, torch.stack(weights), config.aux_loss_alpha * torch.stack(losses).mean()


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("lengths", [(6, 6), (1, 7, 5)])
def test_router_matches_the_loop_with_gradients(lengths, normalise):
    config = dataclasses.replace(CONFIG, norm_topk_prob=normalise)
    router = fill(Router(config, "r", dtype=torch.float64))
    router.expert_bias.copy_(draw(12, seed=7) * 0.3)
    x = draw(sum(lengths), 12).requires_grad_()
    routing = router(x, packed(*lengths))
    choices, weights, aux_loss = loop_router(x, router.weight, router.expert_bias.double(), lengths, config)
    assert routing.experts_TK.tolist() == choices
    torch.testing.assert_close(routing.weights_TK, weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(routing.aux_loss, aux_loss, rtol=1e-12, atol=1e-12)
    upstream = draw(*weights.shape, seed=3)
    got = torch.autograd.grad((routing.weights_TK * upstream).sum() + routing.aux_loss, (x, router.weight))
    want = torch.autograd.grad((weights * upstream).sum() + aux_loss, (x, router.weight))
    for name, left, right in zip(("x", "weight"), got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_the_weight_of_a_single_choice_is_its_score_so_the_router_learns():
    config = dataclasses.replace(CONFIG, num_experts_per_tok=1, norm_topk_prob=True)
    router = fill(Router(config, "r", dtype=torch.float64))
    x = draw(6, 12)
    routing = router(x, packed(6))
    scores = (x @ router.weight.mT).sigmoid().gather(1, routing.experts_TK)
    torch.testing.assert_close(routing.weights_TK, scores * config.routed_scaling_factor)
    (gradient,) = torch.autograd.grad(routing.weights_TK.sum(), router.weight)
    assert gradient.abs().max() > 1e-3


def test_equal_scores_go_to_the_lower_number_of_group_and_expert():
    assert choose_experts(torch.zeros(2, 12), 3, 4, 2).tolist() == [[0, 1, 2]] * 2
    scores = torch.tensor([[0.1, 0.1, 0.0, 0.5, 0.5, 0.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0]])
    assert choose_experts(scores, 3, 4, 2).tolist() == [[3, 4, 6]], "experts 6, 7, 8 tie within the second best group"


def test_a_dropped_group_is_never_chosen_even_if_all_biased_scores_are_negative():
    scores = torch.tensor([[-0.9, -0.9, -0.9, -0.1, -0.2, -0.3]])
    assert choose_experts(scores, 3, 2, 1).tolist() == [[3, 4, 5]]


def test_bias_changes_the_choice_and_not_the_weights():
    router = fill(Router(CONFIG, "r", dtype=torch.float64))
    x, sequences = draw(8, 12), packed(8)
    scores = (x @ router.weight.mT).sigmoid()
    router.expert_bias[5] = 10.0
    routing = router(x, sequences)
    assert (routing.experts_TK[:, 0] == 5).all()
    picked = scores.gather(1, routing.experts_TK)
    want = picked / picked.sum(-1, keepdim=True) * CONFIG.routed_scaling_factor
    torch.testing.assert_close(routing.weights_TK, want)


def test_router_works_in_float32_and_saves_no_float32_copy_of_its_input():
    router = fill(Router(dataclasses.replace(CONFIG, hidden_size=20), "r"))
    x, saved = draw(9, 20).bfloat16().requires_grad_(), []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        routing = router(x, packed(9))
    assert router.weight.dtype is routing.weights_TK.dtype is torch.float32
    assert [tuple(t.shape) for t in saved if t.dtype is torch.bfloat16] == [(9, 20)]
    assert not [t for t in saved if t.dtype is torch.float32 and tuple(t.shape) == (9, 20)]
    routing.weights_TK.sum().backward()
    assert x.grad.dtype is torch.bfloat16


def loop_experts(x, choices, weights, experts):
    out = []
    for token, chosen, weight in zip(x, choices.tolist(), weights, strict=True):
        total = 0.0
        for expert, w in zip(chosen, weight, strict=True):
            gate, up = (experts.linear_fc1.weights()[expert] @ token).chunk(2)
            total = total + w * (experts.linear_fc2.weights()[expert] @ (torch.nn.functional.silu(gate) * up))
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("multiple", [1, 4, 16])
def test_experts_match_the_loop_with_gradients_padding_and_an_empty_expert(multiple):
    experts = fill(Experts(CONFIG, Recompute(), multiple, dtype=torch.float64))
    generator = torch.Generator().manual_seed(1)
    choices = torch.stack([torch.randperm(11, generator=generator)[:3] for _ in range(10)])  # never expert 11
    counts = torch.bincount(choices.flatten(), minlength=12)
    x, weights = draw(10, 12).requires_grad_(), draw(10, 3, seed=5).requires_grad_()
    got, want = experts(x, choices, weights, counts), loop_experts(x, choices, weights, experts)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    upstream = draw(10, 12, seed=8)
    inputs = [x, weights, *experts.parameters()]
    grads = zip(
        torch.autograd.grad(got, inputs, upstream, allow_unused=True),
        torch.autograd.grad(want, inputs, upstream, allow_unused=True),
        ["x", "weights", *(name for name, _ in experts.named_parameters())],
        strict=True,
    )
    for left, right, name in grads:
        if name.endswith("weight11"):
            assert left is None
            assert right is None
            continue
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_dispatch_pads_every_expert_with_zero_rows():
    choices = torch.tensor([[2, 0], [2, 3], [0, 2]])
    plan = plan_dispatch(choices, torch.bincount(choices.flatten(), minlength=5), 4)
    assert plan.rows == [4, 0, 4, 4, 0]
    x = torch.arange(1.0, 4.0)[:, None]
    rows = spread(x, plan).flatten().tolist()
    assert rows == [1, 3, 0, 0, 1, 2, 3, 0, 2, 0, 0, 0]
    assert collect(spread(x, plan), plan).flatten().tolist() == [2.0, 4.0, 6.0]


def test_dispatch_and_combine_are_each_others_transpose_in_bf16():
    choices = choose_experts(draw(40, 12), 3, 4, 2)
    plan = plan_dispatch(choices, torch.bincount(choices.flatten(), minlength=12), 16)
    x = draw(40, 8).bfloat16().requires_grad_()
    rows = spread(x, plan)
    upstream = draw(*rows.shape, seed=2).bfloat16()
    (grad,) = torch.autograd.grad(rows, x, upstream)
    assert torch.equal(grad, collect(upstream, plan))
    exact = upstream.double()[plan.slot_TK].sum(1)
    assert ((grad.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-6).all()


def layer(multiple=1, regions=(), dtype=torch.bfloat16):
    recompute = Recompute(regions)
    return fill(MoELayer(CONFIG, "layer", recompute, expert_row_multiple=multiple, dtype=dtype)), recompute


def test_padding_changes_no_bit_and_no_count():
    x, sequences, results = draw(20, 12).bfloat16(), packed(20), []
    for multiple in (1, 32):
        moe, _ = layer(multiple)
        out, aux_loss = moe(x, sequences)
        results.append((out, aux_loss, moe.router.expert_load.clone()))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
    assert results[0][2].sum() == 20 * CONFIG.num_experts_per_tok


def test_discarding_the_activation_changes_no_bit():
    results = []
    for regions in ((), ("moe_act",)):
        moe, recompute = layer(4, regions)
        x = draw(20, 12).bfloat16().requires_grad_()
        with recompute.tracking():
            out, aux_loss = moe(x, packed(20))
        torch.autograd.backward((out, aux_loss), (draw(20, 12, seed=4).bfloat16(), torch.ones(())))
        results.append([out, x.grad, *(p.grad for p in moe.parameters() if p.grad is not None)])
        assert recompute.replays == ({"moe_act": 2} if regions else {})
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def test_load_counts_training_forwards_with_gradients_only():
    moe, _ = layer()
    x, sequences = draw(6, 12).bfloat16(), packed(6)
    with torch.no_grad():
        moe(x, sequences)
    moe.eval()(x, sequences)
    moe.train().router.count_load = False
    moe(x, sequences)
    assert moe.router.expert_load.sum() == 0
    moe.router.count_load = True
    with record_routing() as tape:
        moe(x, sequences)
    with replay_routing(tape):
        moe(x, sequences)
    assert moe.router.expert_load.sum() == 6 * CONFIG.num_experts_per_tok


def test_bias_moves_against_the_load_and_the_load_is_cleared():
    router = Router(CONFIG, "r")
    router.expert_load.copy_(torch.tensor([0.0, 6.0, 3.0] * 4))
    router.update_bias(0.5)
    assert router.expert_bias.tolist() == [0.5, -0.5, 0.0] * 4
    assert router.expert_load.sum() == 0
    router.update_bias(0.5)
    assert router.expert_bias.tolist() == [0.5, -0.5, 0.0] * 4, "no load, no move"


def test_tape_imposes_choices_and_leaves_the_scores_free():
    moe, _ = layer(dtype=torch.float64)
    x, sequences = draw(6, 12), packed(6)
    with record_routing() as tape:
        first = moe.router(x, sequences)
    assert list(tape.choices) == ["layer.router"]
    moe.router.weight.data.neg_()
    with replay_routing(tape), record_routing() as second_tape:
        replayed = moe.router(x, sequences)
        with pytest.raises(RuntimeError, match="call 1 of layer.router was not recorded"):
            moe.router(x, sequences)
    assert torch.equal(replayed.experts_TK, first.experts_TK)
    assert torch.equal(second_tape.choices["layer.router"][0], first.experts_TK)
    assert not torch.equal(moe.router(x, sequences).experts_TK, first.experts_TK)
    scores = (x @ moe.router.weight.mT).sigmoid().gather(1, first.experts_TK)
    want = scores / scores.sum(-1, keepdim=True) * CONFIG.routed_scaling_factor
    torch.testing.assert_close(replayed.weights_TK, want)
    with replay_routing(tape), pytest.raises(RuntimeError, match="needs"):
        moe.router(x[:3], packed(3))
