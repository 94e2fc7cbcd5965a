"""Known answers of the error measures, worked out by hand."""

import math

import pytest
import torch

from smoke.numerics import UNORDERED, cosine, first_mismatch, max_ulp, relative_norm, sqnr_db, ulp_distance


def bits(dtype, *patterns):
    """A tensor made of bit patterns."""
    integer = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    width = 16 if integer is torch.int16 else 32
    return torch.tensor([p - (1 << width) if p >> (width - 1) else p for p in patterns], dtype=integer).view(dtype)


def test_relative_norm_of_a_known_error():
    assert relative_norm(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1, rel=1e-15)


def test_the_second_argument_is_the_reference():
    assert relative_norm(torch.tensor([2.0]), torch.tensor([1.0])) == 1.0
    assert relative_norm(torch.tensor([1.0]), torch.tensor([2.0])) == 0.5


def test_relative_norm_accumulates_in_float64():
    b = torch.ones(1 << 20, dtype=torch.bfloat16)
    a = b.clone()
    a[0] = 2.0
    assert relative_norm(a, b) == 2.0**-10


def test_float64_operands_keep_their_precision():
    b = torch.tensor([1.0], dtype=torch.float64)
    assert relative_norm(b + 2.0**-50, b) == 2.0**-50


@pytest.mark.parametrize("measure", [relative_norm, cosine, sqnr_db])
def test_nan_in_the_data_is_nan_in_the_measure(measure):
    good, bad = torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan])
    assert math.isnan(measure(good, bad))
    assert math.isnan(measure(bad, good))
    assert math.isnan(measure(bad, torch.zeros(2)))
    assert math.isnan(measure(bad, bad))


@pytest.mark.parametrize("empty", [torch.empty(0), torch.empty(3, 0), torch.zeros(4)])
def test_empty_or_zero_tensors_agree(empty):
    assert relative_norm(empty, empty) == 0.0
    assert cosine(empty, empty) == 1.0
    assert sqnr_db(empty, empty) == math.inf
    assert max_ulp(empty, empty) == 0
    assert first_mismatch(empty, empty) is None


def test_zero_on_one_side_only():
    zero, one = torch.zeros(2), torch.ones(2)
    assert relative_norm(one, zero) == math.inf
    assert relative_norm(zero, one) == 1.0
    assert cosine(one, zero) == cosine(zero, one) == 0.0
    assert sqnr_db(one, zero) == -math.inf
    assert sqnr_db(zero, one) == 0.0


def test_cosine_of_known_angles_and_of_tiny_vectors():
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert cosine(x, y) == pytest.approx(math.sqrt(0.5), rel=1e-15)
    assert cosine(x, -x) == -1.0
    assert cosine(y * 1e-40, y) == pytest.approx(1.0, abs=1e-15)


def test_sqnr_is_twenty_decibels_for_a_tenth():
    assert sqnr_db(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(20.0, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ulp_distance_counts_representable_steps(dtype):
    ulp = torch.finfo(dtype).eps
    a = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.0], dtype=dtype)
    b = torch.tensor([1.0, 1.0 + ulp, 1.0 - ulp, -1.0 - ulp, -0.0], dtype=dtype)
    assert ulp_distance(a, b).tolist() == [0, 1, 2, 1, 0]
    assert ulp_distance(b, a).tolist() == [0, 1, 2, 1, 0]
    assert max_ulp(a, b) == 2


def test_ulp_distance_crosses_zero_and_reaches_infinity():
    a = bits(torch.bfloat16, 0x0001, 0x7F7F, 0xFF80)
    b = bits(torch.bfloat16, 0x8001, 0x7F80, 0x7F80)
    assert ulp_distance(a, b).tolist() == [2, 1, 2 * 0x7F80]
    widest = ulp_distance(bits(torch.float32, 0xFF7FFFFF), bits(torch.float32, 0x7F7FFFFF))
    assert widest.tolist() == [2 * 0x7F7FFFFF]


def test_ulp_distance_of_nan():
    a = bits(torch.float32, 0x7FC00000, 0x7FC00000, 0x3F800000)
    b = bits(torch.float32, 0x7FC00001, 0x3F800000, 0x7FC00000)
    assert ulp_distance(a, b).tolist() == [0, UNORDERED, UNORDERED]


def test_ulp_distance_refuses_mixed_and_integer_types():
    with pytest.raises(TypeError, match=r"torch\.bfloat16 and torch\.float32"):
        ulp_distance(torch.ones(1, dtype=torch.bfloat16), torch.ones(1))
    with pytest.raises(TypeError, match="int64"):
        ulp_distance(torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))


def test_first_mismatch_names_place_bits_and_count():
    a = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    b = a.clone()
    b[1, 0, 2], b[1, 2, 3] = 1.0, -2.0
    place, left, right, count = first_mismatch(a, b)
    assert (place, left, right, count) == ((1, 0, 2), "0x0000", "0x3f80", 2)
    assert all(type(i) is int for i in place)


def test_signed_zeros_differ_in_bits():
    found = first_mismatch(torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0]))
    assert found == ((1,), "0x00000000", "0x80000000", 1)


def test_nan_is_compared_by_its_payload():
    same, other = bits(torch.float32, 0x7FC00000), bits(torch.float32, 0x7FC00001)
    assert first_mismatch(same, same.clone()) is None
    assert first_mismatch(same, other) == ((0,), "0x7fc00000", "0x7fc00001", 1)
    assert first_mismatch(same, torch.ones(1)).right == "0x3f800000"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float8_e4m3fn, torch.int64, torch.float64])
def test_first_mismatch_of_other_widths(dtype):
    a, b = torch.zeros(3).to(dtype), torch.ones(3).to(dtype)
    found = first_mismatch(a, b)
    assert (found.place, found.mismatches, len(found.left)) == ((0,), 3, 2 + 2 * a.element_size())
    assert first_mismatch(b, b.clone()) is None


def test_first_mismatch_of_scalars_strided_and_tracked_tensors():
    assert first_mismatch(torch.tensor(1.0), torch.tensor(2.0)).place == ()
    a = torch.arange(12.0).reshape(3, 4).requires_grad_()
    assert first_mismatch(a.T, a.T.contiguous()) is None
    b = a.detach().clone()
    b[0, 3] = -1.0
    assert first_mismatch(a.T, b.T).place == (3, 0)


@pytest.mark.parametrize("measure", [relative_norm, cosine, sqnr_db, ulp_distance, first_mismatch])
def test_shapes_must_be_equal(measure):
    with pytest.raises(ValueError, match=r"shapes differ: \(2,\) and \(2, 1\)"):
        measure(torch.ones(2), torch.ones(2, 1))


def test_first_mismatch_refuses_other_types():
    with pytest.raises(TypeError, match="dtypes differ"):
        first_mismatch(torch.ones(1), torch.ones(1, dtype=torch.bfloat16))
