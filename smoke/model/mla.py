"""Multi-head latent attention in two forms of the same Parameters.

Queries come from a latent (or straight from the hidden state), keys and values from one latent that all heads share,
plus one rotated key. The two forms:

* absorbed: the K up-projection is applied to the query instead of the key, so that queries meet the latent directly
  (one key head of kv_lora_rank + rope columns), and the V up-projection to the attention's output. The per-head
  products are the leaves ``k_up_absorbed`` and ``v_up_absorbed``; their weights are views of the up-projection's
  Parameter, whose own leaf is then never called.
* plain: keys and values are expanded for every head.

They are equal in exact arithmetic, which the absorbed_parity check tests in float64.

``kv_up_projection`` chooses one combined Parameter (rows of each head: [nope; v], as in Hugging Face's kv_b_proj and
Megatron-core's linear_kv_up_proj) or two split ones; a state dict of either loads into the other.

The recompute region ``mla_up_proj`` spans what lies between the latents' norms and core attention: query up-projection,
K up-projection (absorbed) or K/V up-projection (plain), rope and joins. Module names are Megatron-core's.

Shape letters: T tokens, H width, Q query latent, L key/value latent, N heads, K nope columns, R rotated columns,
V value columns, D columns of the core's query and key (L + R absorbed, K + R plain).
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import Tensor, nn

from smoke.config import ModelConfig
from smoke.kernels.absorb.api import absorbed_key, absorbed_query
from smoke.kernels.mla_rope.api import rope_key_value, rope_query
from smoke.model.attention import Kernel, Sequences, attention_dtype, core_attention, widen
from smoke.model.layers import RMSNorm
from smoke.model.linear import HeadwiseLinear, Linear
from smoke.model.recompute import Recompute
from smoke.model.rope import softmax_scale


class MLASelfAttention(nn.Module):
    """Causal multi-head latent attention over packed or fixed sequences."""

    def __init__(
        self,
        config: ModelConfig,
        impl: str = "reference",
        recompute: Recompute | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device=None,
    ):
        super().__init__()
        self.config, self.impl, self.recompute = config, impl, recompute or Recompute()
        self.heads = config.num_attention_heads
        self.scale = softmax_scale(config)
        self.core_kernels: Counter[Kernel] = Counter()
        self.absorbed = config.attention_form == "absorbed"
        nope, rope, value, latent = self._widths()
        linear = partial(Linear, dtype=dtype, device=device)
        norm = partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype, device=device)
        width, query_width = config.hidden_size, self.heads * (nope + rope)
        if config.q_lora_rank is None:
            self.linear_q_proj = linear(width, query_width)
        else:
            self.linear_q_down_proj = linear(width, config.q_lora_rank)
            self.q_layernorm = norm(config.q_lora_rank)
            self.linear_q_up_proj = linear(config.q_lora_rank, query_width)
        self.linear_kv_down_proj = linear(width, latent + rope)
        self.kv_layernorm = norm(latent)
        if config.kv_up_projection == "combined":
            self.linear_kv_up_proj = linear(latent, self.heads * (nope + value))
        else:
            self.linear_k_up_proj = linear(latent, self.heads * nope)
            self.linear_v_up_proj = linear(latent, self.heads * value)
        if self.absorbed:
            self.k_up_absorbed = HeadwiseLinear(self.heads, nope, latent)
            self.v_up_absorbed = HeadwiseLinear(self.heads, latent, value)
        self.linear_proj = linear(self.heads * value, width)
        self.register_load_state_dict_pre_hook(_convert_kv_up)

    def forward(self, hidden_TH: Tensor, sequences: Sequences, cos_PR: Tensor, sin_PR: Tensor) -> Tensor:
        """hidden [T, H], rope tables [P, R/2] float32 -> [T, H]."""
        query_in_TQ, latent_TL, k_pe_TR = self._down(hidden_TH)
        up = partial(
            self._up_absorbed if self.absorbed else self._up_plain,
            positions_T=sequences.positions_T,
            cos_PR=cos_PR,
            sin_PR=sin_PR,
        )
        core = partial(
            core_attention,
            sequences=sequences,
            scale=self.scale,
            columns=self.config.kv_lora_rank if self.absorbed else self.config.v_head_dim,
            out_dtype=hidden_TH.dtype,
            ran=self.core_kernels,
        )
        with self.recompute.discard("mla_up_proj", up, query_in_TQ, latent_TL, k_pe_TR) as joined:
            out_TNC = self.recompute.checkpoint("core_attn", core, *joined)
        if self.absorbed:
            out_TNC = self.v_up_absorbed(out_TNC, self.kv_up_weights()[1])
        return self.linear_proj(out_TNC.flatten(1))

    def kv_up_weights(self) -> tuple[Tensor, Tensor]:
        """K and V up-projection by head, [N, K, L] and [N, V, L]: views of the Parameter or Parameters."""
        nope, _, value, _ = self._widths()
        if self.config.kv_up_projection == "combined":
            k_NKL, v_NVL = self.linear_kv_up_proj.weight.unflatten(0, (self.heads, -1)).split((nope, value), dim=1)
            return k_NKL, v_NVL
        k_up, v_up = self.linear_k_up_proj.weight, self.linear_v_up_proj.weight
        return k_up.unflatten(0, (self.heads, -1)), v_up.unflatten(0, (self.heads, -1))

    def _widths(self) -> tuple[int, int, int, int]:
        config = self.config
        return config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank

    def _down(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the up-projections read: query input (normed latent, or hidden), normed K/V latent, unrotated key."""
        _, rope, _, latent = self._widths()
        query_in_TQ = hidden_TH
        if self.config.q_lora_rank is not None:
            query_in_TQ = self.q_layernorm(self.linear_q_down_proj(hidden_TH))
        latent_TL, k_pe_TR = self.linear_kv_down_proj(hidden_TH).split((latent, rope), dim=-1)
        return query_in_TQ, self.kv_layernorm(latent_TL), k_pe_TR

    def _query(self, query_in_TQ: Tensor) -> Tensor:
        leaf = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        return leaf(query_in_TQ).unflatten(-1, (self.heads, -1))

    def _up_absorbed(
        self, query_in_TQ: Tensor, latent_TL: Tensor, k_pe_TR: Tensor, positions_T: Tensor, cos_PR, sin_PR
    ) -> tuple[Tensor, Tensor]:
        """Query [T, N, L + R], and the one key [T, 1, L + R] that is also the value."""
        k_up_NLK = self.kv_up_weights()[0].mT
        dtype = attention_dtype(latent_TL)
        rope = {"cos": cos_PR, "sin": sin_PR, "positions_T": positions_T, "impl": self.impl}
        query_TND = absorbed_query(
            self._query(query_in_TQ),
            lambda nope_TNK: self.k_up_absorbed(nope_TNK, k_up_NLK),
            nope_dim=self.config.qk_nope_head_dim,
            out_dtype=dtype,
            **rope,
        )
        return query_TND, absorbed_key(latent_TL, k_pe_TR, out_dtype=dtype, **rope)

    def _up_plain(
        self, query_in_TQ: Tensor, latent_TL: Tensor, k_pe_TR: Tensor, positions_T: Tensor, cos_PR, sin_PR
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key [T, N, K + R], value [T, N, K + R] of which V columns are not zero."""
        nope, rope, value, _ = self._widths()
        if self.config.kv_up_projection == "combined":
            kv_TNC = self.linear_kv_up_proj(latent_TL).unflatten(-1, (self.heads, -1))
        else:
            halves = (self.linear_k_up_proj(latent_TL), self.linear_v_up_proj(latent_TL))
            kv_TNC = torch.cat([half.unflatten(-1, (self.heads, -1)) for half in halves], dim=-1)
        tables = (cos_PR, sin_PR, positions_T)
        query_TND = rope_query(self._query(query_in_TQ), *tables, rope_dim=rope, impl=self.impl)
        key_TND, value_TNV = rope_key_value(kv_TNC, k_pe_TR, *tables, nope_dim=nope, v_dim=value, impl=self.impl)
        dtype, width = attention_dtype(query_TND), max(nope + rope, value)
        query_TND, key_TND, value_TND = (widen(x, width).to(dtype) for x in (query_TND, key_TND, value_TNV))
        return query_TND, key_TND, value_TND


def _convert_kv_up(module: MLASelfAttention, state_dict: dict, prefix: str, *_) -> None:
    """Load-time hook: rewrite combined K/V up-projection weights as split ones, or the reverse, as ``module`` needs."""
    combined, split_k, split_v = (f"{prefix}linear_{name}_up_proj.weight" for name in ("kv", "k", "v"))
    heads, nope = module.heads, module.config.qk_nope_head_dim
    wants_combined = module.config.kv_up_projection == "combined"
    if wants_combined and split_k in state_dict and split_v in state_dict:
        halves = [state_dict.pop(name).unflatten(0, (heads, -1)) for name in (split_k, split_v)]
        state_dict[combined] = torch.cat(halves, dim=1).flatten(0, 1)
    elif not wants_combined and combined in state_dict:
        both = state_dict.pop(combined).unflatten(0, (heads, -1))
        state_dict[split_k] = both[:, :nope].flatten(0, 1)
        state_dict[split_v] = both[:, nope:].flatten(0, 1)
