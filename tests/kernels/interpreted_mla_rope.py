"""Checks of the Triton kernels under Triton's CPU interpreter, in float32 (it gets narrow casts wrong).

test_mla_rope_interpreter.py runs this file in a process of its own, with TRITON_INTERPRET=1.
"""

import pytest
import torch
from mla_rope_cases import check_bounds, check_join, check_key_value, check_position_beyond_the_tables, check_query

sizes = pytest.mark.parametrize(
    ("heads", "copied", "rope_dim"), [(1, 5, 2), (3, 0, 6), (5, 3, 20), (6, 1, 10), (12, 130, 64), (24, 3, 8)]
)


@sizes
def test_query(heads, copied, rope_dim):
    check_query("cpu", torch.float32, heads, copied, rope_dim)


@sizes
def test_key_value(heads, copied, rope_dim):
    check_key_value("cpu", torch.float32, heads, copied, rope_dim)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("heads", "latent", "rope_dim"), [(1, 7, 6), (5, 130, 20), (12, 16, 64)])
def test_join(heads, latent, rope_dim, out_dtype):
    check_join("cpu", torch.float32, out_dtype, heads, latent, rope_dim)


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_bounds(heads):
    check_bounds("cpu", torch.float32, heads)


def test_position_beyond_the_tables():
    check_position_beyond_the_tables("cpu")
