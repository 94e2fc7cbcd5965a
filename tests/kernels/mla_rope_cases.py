"""What the tests of mla_rope share, on whichever device: inputs, a float64 oracle, guarded buffers, kernel checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smoke.kernels.absorb.api import absorbed_key, absorbed_query
from smoke.kernels.mla_rope.api import rope_key_value, rope_query
from smoke.kernels.mla_rope.tables import Tables
from smoke.numerics import first_mismatch

POSITIONS = 97
"""Rows of the tables."""
UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 4 * 2.0**-24}
"""Largest error against float64: of one rounding to BF16, of two float32 products and their sum."""


def draw(*shape: int, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same on every device, exactly representable in ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def tables(tokens: int, rope_dim: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Tables of a magnitude other than one, and positions in no order."""
    angles = draw(POSITIONS, rope_dim // 2, seed=1).double() * 3
    positions = torch.randint(0, POSITIONS, (tokens,), generator=torch.Generator().manual_seed(2))
    positions[:1] = POSITIONS - 1
    return (1.2 * angles.cos()).float().to(device), (1.2 * angles.sin()).float().to(device), positions.to(device)


def rotated(x_TNR: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """The rotation as a product of complex numbers, in float64."""
    x_TNR = x_TNR.double()
    angle_T1R = torch.complex(cos.double(), sin.double())[positions].unsqueeze(1)
    turned = torch.complex(x_TNR[..., 0::2], x_TNR[..., 1::2]) * angle_T1R
    return torch.cat((turned.real, turned.imag), dim=-1)


def query_oracle(q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, rope_dim: int) -> Tensor:
    """rope_query in float64."""
    copied = q.shape[-1] - rope_dim
    return torch.cat((q[..., :copied].double(), rotated(q[..., copied:], cos, sin, positions)), dim=-1)


def key_value_oracle(kv: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, nope: int):
    """rope_key_value in float64."""
    pe = rotated(k_pe.unsqueeze(1), cos, sin, positions).expand(-1, kv.shape[1], -1)
    return torch.cat((kv[..., :nope].double(), pe), dim=-1), kv[..., nope:].double()


def strided(x: Tensor) -> Tensor:
    """The same numbers with gaps between tokens, between heads and between columns, NaN in the gaps."""
    wide = torch.full([2 * size for size in x.shape], float("nan"), dtype=x.dtype, device=x.device)
    view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    view.copy_(x)
    return view


class Guarded:
    """A NaN-poisoned tensor between guard elements, with gaps between its heads and columns."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: str = "cpu"):
        around = (shape[0] + 2, *(2 * size + 3 for size in shape[1:]))
        self.buffer = torch.full(around, float("nan"), dtype=dtype, device=device)
        self.tensor = self.buffer[(slice(1, -1), *(slice(2, 2 + 2 * size, 2) for size in shape[1:]))]
        assert self.tensor.shape == shape

    def untouched(self) -> bool:
        """Whether every element outside the tensor still is NaN (call last: it overwrites the tensor)."""
        self.tensor.fill_(float("nan"))
        return bool(self.buffer.isnan().all())


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest error, relative to the largest magnitude."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))


def check_query(device: str, dtype: torch.dtype, heads: int, copied: int, rope_dim: int) -> None:
    """Triton's rope_query and its gradient equal the reference's to the last bit."""
    looked_up = tables(5, rope_dim, device)
    q = strided(draw(5, heads, copied + rope_dim, seed=3, device=device, dtype=dtype)).requires_grad_()
    upstream = strided(draw(*q.shape, seed=4, device=device, dtype=dtype))
    outs = [rope_query(q, *looked_up, rope_dim=rope_dim, impl=impl) for impl in ("triton", "reference")]
    grads = [torch.autograd.grad(out, q, upstream)[0] for out in outs]
    want = query_oracle(q, *looked_up, rope_dim)
    assert first_mismatch(*outs) is None, "out"
    assert first_mismatch(*grads) is None, "grad q"
    assert relative_error(outs[0], want) <= UNIT[dtype]
    assert relative_error(grads[0], torch.autograd.grad(want, q, upstream.double())[0]) <= UNIT[dtype]


def check_key_value(device: str, dtype: torch.dtype, heads: int, nope: int, rope_dim: int) -> None:
    """Triton's rope_key_value and its gradients: the reference's bits, but for the order of the sum over heads."""
    v_dim, looked_up = nope + 2, tables(5, rope_dim, device)
    kv = strided(draw(5, heads, nope + v_dim, seed=5, device=device, dtype=dtype)).requires_grad_()
    k_pe = strided(draw(5, rope_dim, seed=6, device=device, dtype=dtype)).requires_grad_()
    outs = [
        rope_key_value(kv, k_pe, *looked_up, nope_dim=nope, v_dim=v_dim, impl=impl) for impl in ("triton", "reference")
    ]
    upstream = [strided(draw(*part.shape, seed=7, device=device, dtype=dtype)) for part in outs[0]]
    grads = [torch.autograd.grad(out, (kv, k_pe), upstream, retain_graph=True) for out in outs]
    for name, got, want in zip(
        ("key", "value", "grad kv"), (*outs[0], grads[0][0]), (*outs[1], grads[1][0]), strict=True
    ):
        assert first_mismatch(got, want) is None, name
    wanted = key_value_oracle(kv, k_pe, *looked_up, nope)
    dk_pe = torch.autograd.grad(wanted, k_pe, [u.double() for u in upstream])[0]
    for got in (grads[0][1], grads[1][1]):
        assert relative_error(got, dk_pe) <= UNIT[dtype] * (2 + (heads**0.5 if dtype is torch.float32 else 0)), (
            "grad k_pe"
        )
    again = torch.autograd.grad(outs[0], (kv, k_pe), upstream)
    assert first_mismatch(again[1], grads[0][1]) is None, "grad k_pe changes from run to run"


def check_join(device: str, dtype: torch.dtype, out_dtype: torch.dtype, heads: int, latent: int, rope_dim: int) -> None:
    """Triton's joined query and key of absorbed MLA, and their gradients, equal the reference's to the last bit."""
    cos, sin, positions = tables(5, rope_dim, device)
    looked_up: dict[str, Any] = {"cos": cos, "sin": sin, "positions_T": positions, "out_dtype": out_dtype}
    q = strided(draw(5, heads, 3 + rope_dim, seed=8, device=device, dtype=dtype)).requires_grad_()
    latent_TL = strided(draw(5, latent, seed=9, device=device, dtype=dtype)).requires_grad_()
    k_pe = strided(draw(5, rope_dim, seed=10, device=device, dtype=dtype)).requires_grad_()
    up = draw(3, latent, seed=11, device=device, dtype=dtype)
    found = []
    for impl in ("triton", "reference"):
        joined = absorbed_query(q, lambda x: (x.unsqueeze(-1) * up).sum(2), nope_dim=3, impl=impl, **looked_up)
        key = absorbed_key(latent_TL, k_pe, impl=impl, **looked_up)
        upstream = [strided(draw(*part.shape, seed=12, device=device, dtype=out_dtype)) for part in (joined, key)]
        found.append((joined, key, *torch.autograd.grad((joined, key), (q, latent_TL, k_pe), upstream)))
    for name, got, want in zip(("query", "key", "grad q", "grad latent", "grad k_pe"), *found, strict=True):
        assert first_mismatch(got, want) is None, name
    assert found[0][0].dtype is out_dtype


def check_bounds(device: str, dtype: torch.dtype, heads: int) -> None:
    """Every element is written, and nothing outside the tensors, whose buffers are poisoned with NaN."""
    from smoke.kernels.mla_rope import triton as kernels

    tokens, nope, rope_dim, v_dim = 3, 5, 12, 7
    looked_up = Tables(*tables(tokens, rope_dim, device))
    shapes = {"q": (nope,), "pe": (rope_dim,), "kv": (nope + v_dim,), "key": (nope + rope_dim,), "value": (v_dim,)}
    inputs = {
        name: strided(draw(tokens, heads, *columns, seed=13, device=device, dtype=dtype))
        for name, columns in shapes.items()
    }
    outs = {name: Guarded(tokens, heads, *columns, dtype=dtype, device=device) for name, columns in shapes.items()}
    dk_pe = Guarded(tokens, rope_dim, dtype=dtype, device=device)
    for inverse in (False, True):
        kernels.rotate_into(inputs["q"], inputs["pe"], outs["q"].tensor, outs["pe"].tensor, looked_up, inverse)
        expect_written(outs, "q", "pe")
    kernels.key_value_into(inputs["kv"], inputs["pe"][:, 0], outs["key"].tensor, outs["value"].tensor, looked_up)
    expect_written(outs, "key", "value")
    kernels.key_value_grad_into(inputs["key"], inputs["value"], outs["kv"].tensor, dk_pe.tensor, looked_up)
    expect_written({"kv": outs["kv"], "dk_pe": dk_pe}, "kv", "dk_pe")


def expect_written(buffers: dict[str, Guarded], *names: str) -> None:
    """No NaN inside; only NaN outside."""
    for name in names:
        assert not buffers[name].tensor.isnan().any(), f"{name}: an element was not written"
        assert buffers[name].untouched(), f"{name}: written outside of the tensor"


def check_position_beyond_the_tables(device: str) -> None:
    """Where the API cannot look (on a GPU) the kernels give NaN for such a token, and for no other."""
    from smoke.kernels.mla_rope import triton as kernels

    cos, sin, _ = tables(3, 6, device)
    looked_up = Tables(cos, sin, torch.tensor([-1, 4, POSITIONS], device=device))
    out = kernels.query(draw(3, 2, 8, seed=1, device=device), looked_up, 6)
    assert out[..., 2:].isnan().all(dim=(1, 2)).tolist() == [True, False, True]
    assert not out[..., :2].isnan().any()
    assert not out[1].isnan().any()
