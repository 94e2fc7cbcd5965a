"""One multi-token-prediction module, as in DeepSeek-V3: at token i it predicts the token after the next.

It joins the main model's hidden state at i (after the final norm, as Megatron-core hands it over) with the embedding of
token i + 1, projects the pair to the hidden width, and runs one more decoder layer. Embedding and head are the main
model's. What lies beyond a token's own sequence is never asked for: those labels are ignored.

After "DeepSeek-V3 Technical Report", section 2.2. Shape letters: T tokens, H width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smoke.config import ModelConfig
from smoke.model.attention import Sequences
from smoke.model.layers import RMSNorm
from smoke.model.linear import Linear

IGNORED = -100
"""Label of a position that takes no part in the loss."""


def next_labels(labels_T: Tensor, sequences: Sequences) -> Tensor:
    """labels[i + 1] of the same sequence, where labels[i] is itself a token; else ignored. [T] -> [T]."""
    shifted_T = labels_T.roll(-1)
    shifted_T[sequences.last_tokens()] = IGNORED
    return shifted_T.masked_fill_(labels_T == IGNORED, IGNORED)


class MultiTokenPrediction(nn.Module):
    """Norms, projection and final norm around ``layer``, a decoder layer that is called as ``layer(hidden, *rest)``."""

    def __init__(self, config: ModelConfig, layer: nn.Module, *, dtype: torch.dtype = torch.bfloat16, device=None):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.hnorm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.eh_proj = Linear(2 * width, width, dtype=dtype, device=device)
        self.mtp_model_layer = layer
        self.final_layernorm = RMSNorm(width, eps, dtype=dtype, device=device)

    def forward(self, hidden_TH: Tensor, next_embedding_TH: Tensor, *rest) -> tuple[Tensor, Tensor | None]:
        """Main hidden states and embeddings of the next tokens -> hidden states for the head, auxiliary loss."""
        pair_T2H = torch.cat((self.enorm(next_embedding_TH), self.hnorm(hidden_TH)), dim=-1)
        hidden_TH, aux_loss = self.mtp_model_layer(self.eh_proj(pair_T2H), *rest)
        return self.final_layernorm(hidden_TH), aux_loss
