"""What the user asked for, as one tree of frozen dataclasses.

Every field carries its unit and meaning in the string below it: that string becomes ``--help``. The defaults are the
default run (``configs/debug.yaml`` spells the same values out); the other files in ``configs/`` hold only what differs.
Nothing here is resolved: the word ``auto`` is decided in ``smoke.plan`` and nowhere else.

Sizes carry the names of Hugging Face's ``DeepseekV3Config``; recompute regions those of Megatron-core's
``recompute_modules``. This file imports the standard library only, so that ``--help`` stays fast.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

PRECISIONS = ("bf16", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4")
REGIONS = ("mla_up_proj", "layernorm", "moe_act", "mlp", "core_attn")
BACKENDS = ("auto", "emulated", "te")
IMPLS = ("auto", "reference", "triton")
LAYOUTS = ("sbhd", "thd")
DEVICES = ("auto", "cpu", "cuda")


def nearest(word: str, words: Iterable[str]) -> str:
    """The legal word that looks most like ``word`` (upper and lower case alike), for error messages."""
    by_lower = {legal.lower(): legal for legal in words}
    return by_lower[difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.0)[0]]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN extension of the rotary embedding, with the names of a published ``rope_scaling``."""

    factor: float = 40.0
    """How many times the context is stretched."""
    original_max_position_embeddings: int = 4096
    """Context length, in tokens, before stretching."""
    beta_fast: float = 32.0
    """Rotations over the original context above which a frequency is left alone."""
    beta_slow: float = 1.0
    """Rotations over the original context below which a frequency is divided by the factor."""
    mscale: float = 1.0
    """Attention correction put on cos and sin, relative to mscale_all_dim."""
    mscale_all_dim: float = 1.0
    """Attention correction put, squared, on the softmax scale."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the DeepSeek-V3-shaped model (names of Hugging Face's DeepseekV3Config)."""

    vocab_size: int = 288
    """Rows of the embedding and of the untied head (bytes use ids 0-255, the separator 256)."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_hidden_layers: int = 3
    """Decoder layers, without the multi-token-prediction module."""
    first_k_dense_replace: int = 1
    """Leading layers with a dense MLP in place of experts."""
    intermediate_size: int = 512
    """Inner width of the dense MLP."""
    moe_intermediate_size: int = 128
    """Inner width of each routed expert, and of each shared one."""
    num_attention_heads: int = 4
    """Query heads."""
    q_lora_rank: int | None = 128
    """Width of the query latent; null projects the query straight from the hidden state."""
    kv_lora_rank: int = 64
    """Width of the shared key/value latent."""
    qk_nope_head_dim: int = 32
    """Unrotated columns of each head's query and key."""
    qk_rope_head_dim: int = 32
    """Rotated columns of each head's query, and of the key all heads share (even)."""
    v_head_dim: int = 32
    """Columns of each head's value."""
    n_routed_experts: int = 8
    """Routed experts in each MoE layer."""
    n_shared_experts: int = 1
    """Shared experts in each MoE layer, fused into one MLP."""
    num_experts_per_tok: int = 2
    """Experts chosen for each token."""
    n_group: int = 2
    """Groups that the routed experts are divided into."""
    topk_group: int = 1
    """Groups that a token may choose experts from."""
    norm_topk_prob: bool = True
    """Whether the chosen experts' scores are normalised to sum to one (a single one never is)."""
    routed_scaling_factor: float = 2.5
    """Factor on the sum of the routed experts' outputs."""
    aux_loss_alpha: float = 1e-4
    """Weight of the sequence-wise auxiliary balance loss."""
    bias_update_speed: float = 1e-2
    """Step of the router bias after each optimizer step (DeepSeek-V3 took 1e-3; tens of steps need more to balance)."""
    num_nextn_predict_layers: int = 1
    """Multi-token-prediction modules: 0 or 1."""
    mtp_loss_weight: float = 0.3
    """Weight of the multi-token-prediction loss."""
    rms_norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    max_position_embeddings: int = 163840
    """Longest position, in tokens, that the configuration allows."""
    rope_scaling: RopeScaling | None = field(default_factory=RopeScaling)
    """YaRN scaling; null for plain rotary embeddings."""
    attention_form: str = "absorbed"
    """absorbed: queries meet the latent directly (multi-query); plain: keys and values are expanded per head."""
    kv_up_projection: str = "combined"
    """combined: one linear_kv_up_proj; split: linear_k_up_proj and linear_v_up_proj."""
    attention: str = "native"
    """Whose attention module runs: native (ours)."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from and how they are packed."""

    source: str = "prose"
    """prose (English of Python's own documentation), generated, text:FILE, jsonl:FILE, parquet:FILE."""
    text_field: str = "text"
    """Column of jsonl and parquet files that holds the text."""
    sequence_length: int = 256
    """Tokens in each row (sbhd), or the longest sequence in a pack (thd)."""
    micro_batch_size: int = 4
    """Rows in each batch; a thd pack holds micro_batch_size x sequence_length tokens."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimizer: AdamW on float32 masters of the BF16 parameters."""

    learning_rate: float = 1e-3
    """Constant learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    adam_beta1: float = 0.9
    """Decay of the gradient's running mean."""
    adam_beta2: float = 0.95
    """Decay of the squared gradient's running mean."""
    adam_eps: float = 1e-8
    """AdamW epsilon."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Which GEMMs are quantized. Rows appear in the report's coverage table."""

    keep_bf16: tuple[str, ...] = ()
    """Glob patterns of module names that stay in BF16; a pattern that matches no GEMM is an error."""
    last_layers_bf16: int | None = None
    """Decoder layers at the end kept in BF16; null takes the recipe's own rule (nvfp4: the last 15 %, at least 1)."""
    first_layers_bf16: int = 0
    """Decoder layers at the start kept in BF16."""
    absorbed_kv: str = "bf16"
    """bf16 or recipe: the absorbed per-head K-up and V-up products (Megatron-core keeps them in BF16)."""
    gradient_format: str = "auto"
    """auto, e4m3 or e5m2: element format of FP8 output gradients; auto takes the recipe's default."""
    amax_history_len: int = 1024
    """fp8-delayed: steps of amax history."""
    amax_compute_algo: str = "max"
    """fp8-delayed: max or most_recent."""
    margin: int = 0
    """fp8-delayed: powers of two of headroom."""


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What the checks do; limits live in the recipe table, not here."""

    parity_steps: int = 3
    """Optimizer steps of the recompute_parity and determinism trajectories (at least 3)."""
    gradient_parity_every: int = 5
    """Steps between two gradient comparisons (the first is at step 0)."""
    triton_interpreter: bool = False
    """rope_contract also runs the Triton kernels in Triton's CPU interpreter, in a process of its own (some 10 s)."""
    skip: tuple[str, ...] = ()
    """Checks not to run; skipping a required one ends in exit code 4."""
    bundle: bool = True
    """Whether a red run saves what smoke replay reproduces it from, its weights and batches, in the folder bundle."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Lightning Trainer options that this project passes on."""

    accumulate_grad_batches: int = 1
    """Batches whose gradients make one optimizer step, each label weighing the same."""
    gradient_clip_val: float | None = None
    """Largest norm of all gradients together, to which longer ones are scaled; null clips nothing."""
    checkpoint_every: int | None = None
    """Optimizer steps between two checkpoints (checkpoints/ in the run folder, the newest is kept); null: none."""
    progress_bar: bool = True
    """Show Lightning's progress bar (never when standard output is not a terminal)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One smoke run."""

    precision: str = "mxfp8"
    """bf16, fp8-delayed, fp8-tensorwise, fp8-blockwise, mxfp8 or nvfp4, or Megatron's or Transformer Engine's name."""
    recompute: tuple[str, ...] = ()
    """Regions to recompute: none, or some of mla_up_proj, layernorm, moe_act, mlp, core_attn separated by commas."""
    backend: str = "auto"
    """Who makes the numbers: auto, emulated or te (Transformer Engine)."""
    impl: str = "auto"
    """Who runs our operations: auto, reference or triton."""
    layout: str = "sbhd"
    """sbhd: fixed rows; thd: packed sequences."""
    steps: int = 20
    """Optimizer steps."""
    seed: int = 1234
    """Seed of weights and data order."""
    device: str = "auto"
    """auto, cpu or cuda."""
    out: str | None = None
    """Folder of the report; default runs/<UTC>-<precision>-<recompute>. A folder that is not empty is refused."""
    resume: str | None = None
    """Run folder, or checkpoint file, to go on from; options that are not given are those of its run."""
    baseline: str | None = None
    """File of recorded runs to hold this one against (smoke baseline update); null for none."""
    require_baseline: bool = False
    """End in exit code 6 where the baseline has no entry for this toolchain, device, configuration and data."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Model sizes."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimizer."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Quantization policy."""
    check: CheckConfig = field(default_factory=CheckConfig)
    """Checks."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Trainer."""
