"""Public defects of the libraries around a training job: one row each, matched against what is installed and asked.

A row says which versions of which package are affected, what makes it bite, what it does, what to do and where it is
published. The versions were read in the releases themselves where the reference does not name them. ``asks`` tells
whether a configuration has the trigger; None where no option of this project can have it (the defect concerns whoever
uses the library directly). The table is a list to look things up in, not a scan: what nobody published, or what came
after this release, is not here.

A matched row does not make a run red: this project's own kernels and emulation do not go through the code named. It
says that the same configuration would meet the defect in that library. Only ``blocks`` stops a run, before anything of
the package is imported: a release that was made to steal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from smoke.config import REGIONS, RunConfig
from smoke.environment import Environment

MET, ASKED, INSTALLED, ABSENT = "met", "asked for", "installed", "not here"
"""Installed and asked for; asked for, but the package is not installed; installed, not asked for; neither."""


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One published defect."""

    name: str
    package: str
    """Distribution; one of ``smoke.environment.PACKAGES``."""
    versions: str
    """Affected releases, as a version specifier (PEP 440)."""
    trigger: str
    effect: str
    remedy: str
    reference: str
    asks: Callable[[RunConfig, Environment], bool] | None = None
    """Whether a configuration, its precision in the canonical word, has the trigger."""
    blocks: bool = False
    """Whether no run is started where an affected release is installed."""


@dataclass(frozen=True)
class Match:
    """A defect beside this machine and this request."""

    defect: Defect
    installed: str
    """Installed version; empty where the package is absent."""
    status: str
    """met, asked for, installed or not here."""


def matches(environment: Environment, config: RunConfig | None = None) -> list[Match]:
    """Every row of the table, in its order. Without a configuration nothing is asked for."""
    return [_match(defect, environment, config) for defect in DEFECTS]


def blocker(environment: Environment) -> str:
    """One line on an installed release that must not be imported; empty where there is none."""
    for match in matches(environment):
        if match.defect.blocks and match.status == INSTALLED:
            d = match.defect
            return f"{d.package} {match.installed}: {d.effect}; {d.remedy} ({d.reference})"
    return ""


def _match(defect: Defect, environment: Environment, config: RunConfig | None) -> Match:
    version = environment.packages.get(defect.package, "")
    affected = affects(defect.versions, version)
    asked = config is not None and defect.asks is not None and defect.asks(config, environment)
    if affected:
        return Match(defect, version, MET if asked else INSTALLED)
    return Match(defect, version, ASKED if asked and not version else ABSENT)


def affects(specifier: str, version: str) -> bool:
    """Whether a version lies in the specifier, pre-releases and local labels included; False for one that is none."""
    try:
        return bool(version) and SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _quantized(config: RunConfig) -> bool:
    return config.precision != "bf16"


def _absorbed_replay(config: RunConfig, _: Environment) -> bool:
    return _quantized(config) and "mla_up_proj" in config.recompute and config.model.attention_form == "absorbed"


def _partial_head_block(config: RunConfig, _: Environment) -> bool:
    """Autotuned head blocks are powers of two up to 128: one of them does not divide such a head count."""
    heads = config.model.num_attention_heads
    return heads % min(128, 1 << max(heads.bit_length() - 1, 0)) != 0


def _core_attention_replay(config: RunConfig, _: Environment) -> bool:
    return _quantized(config) and "core_attn" in config.recompute


def _everything_replayed(config: RunConfig, _: Environment) -> bool:
    mtp = config.model.num_nextn_predict_layers > 0
    return _quantized(config) and mtp and set(REGIONS) == set(config.recompute)


def _delayed_replay(config: RunConfig, _: Environment) -> bool:
    return config.precision == "fp8-delayed" and bool(config.recompute)


def _nvfp4_on_sm_12x(config: RunConfig, environment: Environment) -> bool:
    return config.precision == "nvfp4" and any(device.capability[0] == 12 for device in environment.devices)


def _resumed(config: RunConfig, _: Environment) -> bool:
    return config.resume is not None


def _mxfp8_with_e5m2(config: RunConfig, _: Environment) -> bool:
    return config.precision == "mxfp8" and config.policy.gradient_format == "e5m2"


DEFECTS: tuple[Defect, ...] = (
    Defect(
        name="lightning-malware",
        package="lightning",
        versions=">=2.6.2,<2.6.4",
        trigger="import lightning",
        effect="a malicious release: importing it steals credentials",
        remedy="remove it, install 2.6.4 or later, and replace every key and token this machine could read",
        reference="GHSA-w37p-236h-pfx3",
        blocks=True,
    ),
    Defect(
        name="absorbed-mla-refuses-fp8",
        package="megatron-core",
        versions=">=0.17,<=0.19.2",
        trigger="absorbed attention, FP8 or FP4, recompute of mla_up_proj",
        effect="the first forward stops with an assertion, 'FP8/FP4 is not supported for AbsorbedMLA'",
        remedy="take the public change that lifts it, or leave mla_up_proj out",
        reference="https://github.com/NVIDIA/Megatron-LM/pull/6914",
        asks=_absorbed_replay,
    ),
    Defect(
        name="fused-mla-rope-heads",
        package="megatron-core",
        versions=">=0.13,<=0.19.2",
        trigger="fused MLA rope with a head count that an autotuned block of heads does not divide",
        effect="the last block of heads reads and writes rows of the next token, or past the tensor",
        remedy="a power of two of heads on each rank, or rope fusion off",
        reference="https://github.com/NVIDIA/Megatron-LM/issues/7103",
        asks=_partial_head_block,
    ),
    Defect(
        name="fused-mla-rope-table",
        package="megatron-core",
        versions=">=0.13,<=0.19.2",
        trigger="MLA with rotary_percent below 1: the cos and sin tables are narrower than the rotated columns",
        effect="the fused kernel reads past the tables, NaN from the second step on; unfused, columns stay unrotated",
        remedy="rotary_percent 1.0 (qk_pos_emb_head_dim already is the rotated part)",
        reference="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4271",
    ),
    Defect(
        name="core-attn-replay-in-bf16",
        package="megatron-core",
        versions="<=0.19.2",
        trigger="FP8 with recompute of core_attn through tensor_parallel.checkpoint",
        effect="Transformer Engine modules in the region replay outside the FP8 context, silently in BF16",
        remedy="leave core_attn out, or take the public change",
        reference="https://github.com/NVIDIA/Megatron-LM/pull/7538",
        asks=_core_attention_replay,
    ),
    Defect(
        name="mtp-replay-drops-gradients",
        package="megatron-core",
        versions=">=0.14,<0.18",
        trigger="FP8, multi-token prediction and recompute of whole layers",
        effect="tensors passed by keyword are no inputs of the checkpoint, and gradients inside the module are lost",
        remedy="megatron-core 0.18 or later",
        reference="https://github.com/NVIDIA/Megatron-LM/pull/4593",
        asks=_everything_replayed,
    ),
    Defect(
        name="replay-loses-gradient-scales",
        package="transformer-engine",
        versions="<1.12",
        trigger="delayed scaling with activation recompute",
        effect="scales of output gradients are never updated",
        remedy="transformer-engine 1.12 or later",
        reference="https://github.com/NVIDIA/TransformerEngine/issues/1190",
        asks=_delayed_replay,
    ),
    Defect(
        name="replay-overwrites-scales",
        package="transformer-engine",
        versions=">=2.1,<2.4",
        trigger="delayed scaling with activation recompute",
        effect="the newest scales are kept by reference, so the older ones of the replay stay in their place",
        remedy="transformer-engine 2.4 or later",
        reference="https://github.com/NVIDIA/TransformerEngine/pull/1723",
        asks=_delayed_replay,
    ),
    Defect(
        name="nvfp4-gradients-of-zero",
        package="transformer-engine",
        versions=">=2.8,<2.20",  # the change is of July 2026; which release took it first was not checked
        trigger="nvfp4 with stochastic rounding on compute capability 12.x",
        effect="output gradients are quantized to zeros, the message goes to the device's standard output",
        remedy="a release with the public change, or another precision there",
        reference="https://github.com/NVIDIA/TransformerEngine/pull/3281",
        asks=_nvfp4_on_sm_12x,
    ),
    Defect(
        name="mxfp8-e5m2-gradients",
        package="transformer-engine",
        versions=">=2.0",
        trigger="MXFP8 with a hybrid format: E5M2 output gradients",
        effect="accepted without a word; published runs diverged late in training",
        remedy="--policy.gradient_format auto (E4M3 throughout)",
        reference="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/638",
        asks=_mxfp8_with_e5m2,
    ),
    Defect(
        name="mxfp8-scales-rounded-down",
        package="torchao",
        versions="<=0.18",
        trigger="torchao's own MXFP8 with its default scaling mode (FLOOR)",
        effect="block scales are rounded down, so the largest elements of a block saturate",
        remedy="ScaleCalculationMode.RCEIL, which rounds as Transformer Engine does",
        reference="https://github.com/pytorch/ao/issues/2035",
    ),
    Defect(
        name="checkpoint-runs-code",
        package="torch",
        versions="<2.10",
        trigger="torch.load of a checkpoint from elsewhere, even with weights_only=True",
        effect="a crafted file corrupts memory and can run code (below 2.6 it runs code at once)",
        remedy="torch 2.10 or later",
        reference="CVE-2026-24747, CVE-2025-32434",
        asks=_resumed,
    ),
    Defect(
        name="cudnn-attention-nan",
        package="torch",
        versions=">=2.11,<=2.13",
        trigger="scaled_dot_product_attention by cuDNN on Hopper: a mask tensor, and sequence length % 128 = 64",
        effect="NaN in the gradient of the query where a row's log-sum-exp is very negative",
        remedy="is_causal without a mask tensor, as here, or enable_cudnn_sdp(False)",
        reference="https://github.com/pytorch/pytorch/issues/196678",
    ),
    Defect(
        name="interpreter-multiplies-bits",
        package="triton",
        versions="<=3.9",
        trigger="TRITON_INTERPRET=1 with tl.dot of BF16 operands",
        effect="bit patterns are multiplied in place of values",
        remedy="widen to float32 first, or judge on a GPU",
        reference="https://github.com/triton-lang/triton/issues/11584",
    ),
)
"""Every row. A test holds the packages against the environment's list and the specifiers against PEP 440."""
