"""RMSNorm, SwiGLU, dense MLP, embedding: values, gradients, and what they keep for backward."""

import pytest
import torch
from torch.autograd import gradcheck

from smoke.model.layers import DenseMLP, Embedding, RMSNorm, swiglu
from smoke.model.recompute import Recompute


def draw(*shape, dtype=torch.float64, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def saved_by(fn):
    """What autograd was handed to save while ``fn`` ran."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return saved


def naive_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (3, 64)])
def test_rms_norm_and_its_gradients_match_the_formula_in_float64(shape):
    norm = RMSNorm(shape[1], 1e-6, dtype=torch.float64)
    norm.weight = torch.nn.Parameter(draw(shape[1], seed=3).detach())
    x, upstream = draw(*shape), draw(*shape, seed=9, grad=False)
    got = torch.autograd.grad((norm(x) * upstream).sum(), (x, norm.weight))
    want = torch.autograd.grad((naive_norm(x, norm.weight, 1e-6) * upstream).sum(), (x, norm.weight))
    for name, left, right in zip(("x", "weight"), got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


def test_rms_norm_in_bf16_rounds_once():
    norm = RMSNorm(96, 1e-6)
    x = draw(33, 96, dtype=torch.bfloat16)
    exact = naive_norm(x.double(), norm.weight.double(), 1e-6)
    got = norm(x)
    assert got.dtype is torch.bfloat16
    differ = got != exact.bfloat16()
    assert differ.float().mean() < 0.002, "only float64 values beside a tie may round the other way"
    assert ((got.double() - exact).abs() <= exact.abs() * 2.0**-8 * 1.001).all()


def test_rms_norm_saves_its_input_and_one_number_a_row():
    norm, x = RMSNorm(96, 1e-6), draw(33, 96, dtype=torch.bfloat16)
    saved = saved_by(lambda: norm(x))
    assert sorted((tuple(t.shape), str(t.dtype)) for t in saved) == [
        ((33, 1), "torch.float32"),
        ((33, 96), "torch.bfloat16"),
        ((96,), "torch.bfloat16"),
    ]
    assert any(t.data_ptr() == x.data_ptr() for t in saved)


@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_gradients(weighted):
    x = draw(5, 14)
    assert gradcheck(swiglu, (x, draw(5, seed=4)) if weighted else (x,))


def test_swiglu_matches_the_formula_and_saves_only_its_inputs():
    x, weight = draw(9, 20, dtype=torch.bfloat16), draw(9, dtype=torch.float32, seed=2)
    gate, up = x.double().chunk(2, dim=-1)
    exact = gate * gate.sigmoid() * up * weight.double()[:, None]
    saved = saved_by(lambda: swiglu(x, weight))
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), weight.data_ptr()}
    assert ((swiglu(x, weight).double() - exact).abs() <= exact.abs() * 2.0**-8 * 1.001).all()


def test_dense_mlp_is_the_same_with_and_without_discarding_its_activation():
    results = []
    for regions in ((), ("moe_act",)):
        recompute = Recompute(regions)
        mlp = DenseMLP(24, 40, recompute=recompute, region="moe_act")
        for index, parameter in enumerate(mlp.parameters()):
            parameter.data.copy_(draw(*parameter.shape, dtype=torch.bfloat16, seed=index).detach())
        x = draw(11, 24, dtype=torch.bfloat16)
        with recompute.tracking():
            y = mlp(x)
        y.backward(draw(11, 24, dtype=torch.bfloat16, seed=5, grad=False))
        results.append([y, x.grad, *(parameter.grad for parameter in mlp.parameters())])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))
    assert all(result.abs().sum() > 0 for result in results[0])


def test_embedding_gradient_is_summed_in_float32():
    embedding = Embedding(7, 4)
    embedding.weight.data.copy_(draw(7, 4, dtype=torch.bfloat16).detach())
    tokens = torch.tensor([3] * 600 + [1])
    out = embedding(tokens)
    assert torch.equal(out, embedding.weight[tokens])
    out.backward(torch.ones(601, 4, dtype=torch.bfloat16))
    want = torch.zeros(7, 4)
    want[3], want[1] = 600.0, 1.0
    assert torch.equal(embedding.weight.grad.float(), want), "in BF16 the sum would stop at 256"
