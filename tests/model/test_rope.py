"""Rope tables against a scalar float64 oracle and against Hugging Face's; positions of every layout."""

import dataclasses
import math

import pytest
import torch

from smoke.config import ModelConfig, RopeScaling
from smoke.model.rope import (
    correction_range,
    inverse_frequencies,
    positions_context_parallel,
    positions_packed,
    positions_sbhd,
    rope_table,
    softmax_scale,
)

PLAIN = ModelConfig(rope_scaling=None, qk_rope_head_dim=20)
PUBLISHED = ModelConfig(qk_nope_head_dim=128, qk_rope_head_dim=64)
UNEQUAL = dataclasses.replace(
    PUBLISHED,
    rope_theta=50000.0,
    rope_scaling=RopeScaling(factor=64.0, mscale=0.707, mscale_all_dim=1.2, original_max_position_embeddings=2048),
)
SMALL = ModelConfig(
    qk_rope_head_dim=6,
    rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=0.5),
)
CONFIGS = {"plain": PLAIN, "published": PUBLISHED, "unequal": UNEQUAL, "small": SMALL}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def oracle(config, position, pair):
    """cos and sin of one entry, by YaRN's formulas, one number at a time."""
    width, scaling = config.qk_rope_head_dim, config.rope_scaling
    frequency = 1.0 / config.rope_theta ** (2 * pair / width)
    magnitude = 1.0
    if scaling is not None:
        context = scaling.original_max_position_embeddings

        def index(turns):
            return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

        low, high = max(math.floor(index(scaling.beta_fast)), 0), min(math.ceil(index(scaling.beta_slow)), width - 1)
        kept = 1.0 - min(max((pair - low) / (high - low), 0.0), 1.0)
        frequency = frequency / scaling.factor * (1.0 - kept) + frequency * kept
        top = 0.1 * scaling.mscale * math.log(scaling.factor) + 1.0
        magnitude = top / (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0)
    return magnitude * math.cos(position * frequency), magnitude * math.sin(position * frequency)


@every_config
def test_every_entry_is_the_oracles_rounded_to_float32(config):
    cos, sin = rope_table(config, length=301)
    assert cos.dtype is sin.dtype is torch.float32
    assert cos.shape == sin.shape == (301, config.qk_rope_head_dim // 2)
    pairs = range(config.qk_rope_head_dim // 2)
    want = torch.tensor([[oracle(config, p, i) for i in pairs] for p in range(301)], dtype=torch.float64)
    torch.testing.assert_close(cos.double(), want[..., 0], rtol=2.0**-24, atol=1e-12)
    torch.testing.assert_close(sin.double(), want[..., 1], rtol=2.0**-24, atol=1e-12)


def hugging_face(config):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        parameters |= {"rope_type": "yarn", **dataclasses.asdict(config.rope_scaling)}
    theirs = DeepseekV3Config(
        hidden_size=64,
        num_attention_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        v_head_dim=8,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=parameters,
    )
    theirs.head_dim = config.qk_rope_head_dim
    return DeepseekV3RotaryEmbedding(theirs), DeepseekV3Attention(theirs, layer_idx=0).scaling


@every_config
def test_tables_and_softmax_scale_are_hugging_faces(config):
    with torch.random.fork_rng(devices=[]):
        rotary, scaling = hugging_face(config)
    torch.testing.assert_close(inverse_frequencies(config).float(), rotary.inv_freq, rtol=1e-6, atol=0)
    positions = torch.arange(512)
    theirs = rotary(torch.empty(1, dtype=torch.float32), positions.unsqueeze(0))
    half = config.qk_rope_head_dim // 2
    for name, ours, table in zip(("cos", "sin"), rope_table(config, length=512), theirs, strict=True):
        # Theirs computes angles in float32: 512 radians carry an error of 3e-5.
        torch.testing.assert_close(ours, table[0, :, :half], rtol=0, atol=6e-5, msg=lambda text, n=name: f"{n}: {text}")
    assert softmax_scale(config) == pytest.approx(scaling, rel=1e-12)


def test_published_corrections():
    assert correction_range(PUBLISHED.rope_scaling, 64, 10000.0) == (10, 23)
    assert softmax_scale(PUBLISHED) == pytest.approx((0.1 * math.log(40.0) + 1.0) ** 2 / math.sqrt(192))
    assert softmax_scale(PLAIN) == pytest.approx(1 / math.sqrt(32 + 20))
    frequencies = inverse_frequencies(PUBLISHED)
    plain = inverse_frequencies(dataclasses.replace(PUBLISHED, rope_scaling=None))
    torch.testing.assert_close(frequencies[:11], plain[:11], rtol=1e-15, atol=0)
    torch.testing.assert_close(frequencies[23:], plain[23:] / 40.0, rtol=1e-15, atol=0)
    assert (rope_table(PUBLISHED, length=1)[0] == 1.0).all(), "equal corrections leave the magnitude at one"


def test_without_mscale_all_dim_the_magnitude_is_on_the_tables_alone():
    scaling = RopeScaling(mscale=1.0, mscale_all_dim=0.0)
    config = ModelConfig(rope_scaling=scaling)
    assert softmax_scale(config) == pytest.approx((32 + 32) ** -0.5)
    torch.testing.assert_close(rope_table(config, length=1)[0][0], torch.full((16,), 0.1 * math.log(40.0) + 1.0))


def test_an_empty_ramp_divides_every_later_frequency():
    scaling = RopeScaling(factor=4.0, original_max_position_embeddings=4096, beta_fast=1.0001, beta_slow=1.0)
    low, high = correction_range(scaling, 2, 10000.0)
    assert high > low
    config = ModelConfig(qk_rope_head_dim=2, rope_scaling=scaling)
    assert torch.isfinite(inverse_frequencies(config)).all()


def test_default_length_is_the_longest_position():
    cos, _ = rope_table(ModelConfig(max_position_embeddings=77))
    assert cos.shape == (77, 16)
    with pytest.raises(ValueError, match=r"78 positions: --model.max_position_embeddings 77"):
        rope_table(ModelConfig(max_position_embeddings=77), length=78)


@pytest.mark.parametrize(("width", "legal"), [(7, "6 or 8"), (1, "2"), (0, "2")])
def test_odd_widths_are_refused_with_the_nearest_legal(width, legal):
    with pytest.raises(ValueError, match=rf"--model.qk_rope_head_dim {width}: .* {legal}$"):
        rope_table(ModelConfig(qk_rope_head_dim=width), length=4)


def test_positions_of_rows():
    assert positions_sbhd(2, 3).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert positions_sbhd(2, 3).dtype is torch.int64


def test_positions_of_packs_restart_at_every_edge():
    positions = positions_packed(torch.tensor([0, 3, 4, 4, 6], dtype=torch.int32))
    assert positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert positions.dtype is torch.int64


@pytest.mark.parametrize("edges", [[1, 3], [0, 4, 3], [0], [[0, 3]]])
def test_edges_that_are_no_edges_are_refused(edges):
    with pytest.raises(ValueError, match="must be one row that starts at 0 and rises"):
        positions_packed(torch.tensor(edges))


def test_context_parallel_positions_are_the_zig_zag():
    assert positions_context_parallel(16, 2, 0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert positions_context_parallel(16, 2, 1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert positions_context_parallel(6, 1, 0).tolist() == list(range(6))
    whole = torch.cat([positions_context_parallel(24, 4, rank) for rank in range(4)])
    assert sorted(whole.tolist()) == list(range(24))


@pytest.mark.parametrize(
    ("length", "size", "rank", "message"),
    [
        (18, 2, 0, "a multiple of 4; the nearest legal is 16 or 20"),
        (3, 2, 0, "the nearest legal is 4"),
        (16, 2, 2, "rank 2 of 2"),
        (16, 0, 0, "rank 0 of 0"),
    ],
)
def test_context_parallel_requests_that_cannot_be(length, size, rank, message):
    with pytest.raises(ValueError, match=message):
        positions_context_parallel(length, size, rank)
