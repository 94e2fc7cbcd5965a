"""A DeepSeek-V3-shaped decoder: leading dense layers, mixture-of-experts layers, one multi-token-prediction module.

Tokens run flat, [T, ...], in both layouts (``smoke.model.attention.Sequences``). Parameters are BF16, the router's
weight and its buffers float32; nothing here knows of precision recipes. The whole forward runs inside
``Recompute.tracking``. With float64 parameters (``dtype``, ``model.double()`` or ``functional_call``) the forward is
float64 throughout, which is how parity of two mathematically equal forms is judged.

Shape letters: T tokens, H width, V vocabulary, B rows, S tokens of a row.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

from smoke.config import ModelConfig
from smoke.model.attention import Sequences
from smoke.model.layers import DenseMLP, Embedding, RMSNorm
from smoke.model.linear import Linear
from smoke.model.mla import MLASelfAttention
from smoke.model.moe import MoELayer
from smoke.model.mtp import MultiTokenPrediction, next_labels
from smoke.model.recompute import Recompute
from smoke.model.rope import rope_table
from smoke.model.routing import Router


class ModelOutput(NamedTuple):
    """What the loss is made of. Ignored labels are -100."""

    logits_TV: Tensor
    labels_T: Tensor
    mtp_logits_TV: Tensor | None
    mtp_labels_T: Tensor | None
    aux_loss: Tensor
    """Sum of the layers' sequence-wise auxiliary losses, already weighted."""


class DecoderLayer(nn.Module):
    """Attention and MLP (dense or experts), each behind a norm and beside the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        label: str,
        *,
        dense: bool,
        impl: str,
        recompute: Recompute,
        expert_row_multiple: int,
        dtype: torch.dtype,
        device=None,
    ):
        super().__init__()
        self.recompute, self.dense = recompute, dense
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.self_attention = MLASelfAttention(config, impl, recompute, dtype=dtype, device=device)
        self.pre_mlp_layernorm = RMSNorm(width, eps, dtype=dtype, device=device)
        if dense:
            self.mlp: nn.Module = DenseMLP(width, config.intermediate_size, dtype=dtype, device=device)
        else:
            self.mlp = MoELayer(
                config,
                f"{label}.mlp",
                recompute,
                expert_row_multiple=expert_row_multiple,
                dtype=dtype,
                device=device,
            )

    def forward(
        self, hidden_TH: Tensor, sequences: Sequences, cos_PR: Tensor, sin_PR: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [T, H] -> [T, H] and the auxiliary loss (None for a dense layer)."""
        with self.recompute.discard("layernorm", self.input_layernorm, hidden_TH) as normed_TH:
            hidden_TH = hidden_TH + self.self_attention(normed_TH, sequences, cos_PR, sin_PR)
        aux_loss = None
        with self.recompute.discard("layernorm", self.pre_mlp_layernorm, hidden_TH) as normed_TH:
            if self.dense:
                out_TH = self.recompute.checkpoint("mlp", self.mlp, normed_TH)
            else:
                out_TH, aux_loss = self.mlp(normed_TH, sequences)
        return hidden_TH + out_TH, aux_loss


class DeepseekV3(nn.Module):
    """The model. ``layout`` is sbhd or thd; ``impl`` is reference or triton; see ``smoke.config.ModelConfig``."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        layout: str,
        impl: str = "reference",
        recompute: Recompute | None = None,
        expert_row_multiple: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device=None,
    ):
        super().__init__()
        self.config, self.layout = config, layout
        self.recompute = recompute or Recompute()
        self._tables: tuple[Tensor, Tensor] | None = None

        def layer(label: str, dense: bool) -> DecoderLayer:
            return DecoderLayer(
                config,
                label,
                dense=dense,
                impl=impl,
                recompute=self.recompute,
                expert_row_multiple=expert_row_multiple,
                dtype=dtype,
                device=device,
            )

        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            layer(f"layers.{i}", i < config.first_k_dense_replace) for i in range(config.num_hidden_layers)
        )
        self.final_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.output_layer = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device=device)
        self.mtp = None
        if config.num_nextn_predict_layers:
            self.mtp = MultiTokenPrediction(config, layer("mtp.mtp_model_layer", False), dtype=dtype, device=device)

    def forward(self, batch: dict[str, Tensor]) -> ModelOutput:
        """A batch of the model's layout (int64 tokens, labels, positions; thd: int32 cu_seqlens) -> ModelOutput."""
        sequences = Sequences.of(batch, self.layout)
        tables = self.rope_tables(sequences.positions_T)
        with self.recompute.tracking([*self.parameters(), *self.buffers(), *tables], self):
            return self._forward(batch, (sequences, *tables))

    def _forward(self, batch: dict[str, Tensor], around: tuple[Sequences, Tensor, Tensor]) -> ModelOutput:
        tokens_T, labels_T = batch["tokens"].flatten(), batch["labels"].flatten()
        hidden_TH, losses = self.embedding(tokens_T), []
        for layer in self.layers:
            hidden_TH, aux_loss = layer(hidden_TH, *around)
            losses.append(aux_loss)
        hidden_TH = self.final_layernorm(hidden_TH)
        mtp_logits_TV = mtp_labels_T = None
        if self.mtp is not None:
            next_TH = self.embedding(labels_T.clamp(min=0))
            mtp_TH, aux_loss = self.mtp(hidden_TH, next_TH, *around)
            losses.append(aux_loss)
            mtp_logits_TV, mtp_labels_T = self.output_layer(mtp_TH), next_labels(labels_T, around[0])
        present = [loss for loss in losses if loss is not None]
        total = torch.stack(present).sum() if present else hidden_TH.new_zeros((), dtype=torch.float32)
        return ModelOutput(self.output_layer(hidden_TH), labels_T, mtp_logits_TV, mtp_labels_T, total)

    def init_weights(self, seed: int) -> None:
        """Normal weights of standard deviation initializer_range, norms one, router state zero."""
        generators: dict[torch.device, torch.Generator] = {}
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                    continue
                device = parameter.device
                if device not in generators:
                    generators[device] = torch.Generator(device).manual_seed(seed)
                draw = torch.empty(parameter.shape, dtype=torch.float32, device=device)
                parameter.copy_(draw.normal_(0.0, self.config.initializer_range, generator=generators[device]))
            for router in self.routers():
                router.expert_bias.zero_()
                router.expert_load.zero_()

    def routers(self) -> list[Router]:
        """All routers, in order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def after_optimizer_step(self) -> None:
        """Move the routers' biases by the load since the last call, and clear the load counters."""
        for router in self.routers():
            router.update_bias(self.config.bias_update_speed)

    def gradient_slices(self) -> dict[str, list[tuple[str, int, int]]]:
        """By parameter name: (slice name, first row, end row) of the parts whose gradients are judged on their own."""
        return {
            name: slices
            for name, _ in self.named_parameters()
            if (slices := _slices(self.config, name.removesuffix(".weight").rpartition(".")[2]))
        }

    def rope_tables(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Tables that reach beyond the largest position; kept, and doubled when a batch asks for more."""
        needed, device = int(positions_T.max()) + 1, positions_T.device
        if self._tables is None or self._tables[0].device != device or self._tables[0].shape[0] < needed:
            length = max(needed, min(2 * needed, self.config.max_position_embeddings))
            self._tables = rope_table(self.config, device, length=length)
        return self._tables


def _slices(config: ModelConfig, leaf: str) -> list[tuple[str, int, int]]:
    """Row ranges of one leaf's weight, named."""
    nope, rope, value, heads = (
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.num_attention_heads,
    )
    head_rows = {
        "linear_q_proj": nope + rope,
        "linear_q_up_proj": nope + rope,
        "linear_kv_up_proj": nope + value,
        "linear_k_up_proj": nope,
        "linear_v_up_proj": value,
    }
    if leaf in head_rows:
        rows = head_rows[leaf]
        return [(f"head {head}", head * rows, (head + 1) * rows) for head in range(heads)]
    if leaf == "linear_kv_down_proj":
        latent = config.kv_lora_rank
        return [("latent", 0, latent), ("rope", latent, latent + rope)]
    return []


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Parameters of the main model (without the multi-token-prediction module), all and active for one token.

    Counted on the meta device: nothing is allocated. Active are all but the routed experts a token does not choose.
    """
    model = DeepseekV3(dataclasses.replace(config, num_nextn_predict_layers=0), layout="sbhd", device="meta")
    total = sum(parameter.numel() for parameter in model.parameters())
    routed = sum(p.numel() for name, p in model.named_parameters() if ".mlp.experts." in name)
    idle = config.n_routed_experts - config.num_experts_per_tok
    return total, total - routed // config.n_routed_experts * idle
