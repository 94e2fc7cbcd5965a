"""Checks of the portable Triton kernels under Triton's CPU interpreter, in float32 (it gets narrow casts wrong).

test_attention.py runs this file in a process of its own, with TRITON_INTERPRET=1.
"""

import pytest
import torch
from attention_cases import LENGTHS, check, check_leak

from smoke.kernels.attention import triton as kernels


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize(("heads", "latent", "rotated"), [(1, 32, 16), (3, 16, 16), (11, 16, 32)])
def test_against_the_definition(heads, latent, rotated, lengths):
    check(kernels, lengths, heads, latent, rotated, torch.float32, "cpu", 1e-5)


def test_sequences_do_not_meet():
    check_leak(kernels, 3, 16, 16, torch.float32, "cpu")
