"""Where sequences lie on the token axis, and causal attention inside them.

All activations of the model are [T, ...]: sbhd rows are laid out one after the other, packed (thd) sequences already
are. ``Sequences`` carries the edges; ``core_attention`` never looks across one.

The stock ``scaled_dot_product_attention`` runs in its flash form only if query, key and value are equally wide; its
other form saves float32 copies and every probability, and recompute would then free nothing. So callers hand in
equally wide tensors and say how many columns of the result they keep: in the absorbed form of MLA the value *is* the
key (latent and rotated columns), in the plain form the value is padded with zeros (``widen``).

On a CPU without BF16 instructions the stock kernel is a hundred times slower in BF16 than in float32. There the callers
emit float32 copies of their BF16 numbers (``attention_dtype``), and the result is rounded to BF16 afterwards: the same
numbers, summed in float32 in both cases.

Torch chooses among its kernels by sizes, types and flags, and says nothing. What autograd recorded says which one ran
(``backend_of``); who hands in a counter is told for every call.

Shape letters: T tokens, B rows, S tokens of a row, N heads, G key heads (1 or N), D width of a head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from smoke.kernels.support import stock_bf16


class Kernel(NamedTuple):
    """What ran one call of core attention: the backend, and type and width of query, key and value."""

    backend: str
    dtype: str
    columns: int


@dataclass(frozen=True)
class Sequences:
    """The sequences on the token axis of one batch."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, in order; none is empty."""
    positions_T: Tensor
    """Position of each token inside its sequence, int64."""

    @staticmethod
    def of(batch: Mapping[str, Tensor], layout: str) -> Sequences:
        """Read the edges off a batch: rows of equal length (sbhd) or ``cu_seqlens`` (thd)."""
        positions = batch["positions"]
        if layout == "sbhd":
            rows, length = positions.shape
            return Sequences((length,) * rows, positions.reshape(-1))
        edges = batch["cu_seqlens"].tolist()
        lengths = tuple(end - start for start, end in zip(edges, edges[1:], strict=False))
        if edges[0] != 0 or edges[-1] != positions.shape[0] or min(lengths, default=0) < 1:
            raise ValueError(f"cu_seqlens {edges} must rise from 0 to the {positions.shape[0]} tokens of the pack")
        return Sequences(lengths, positions)

    @property
    def uniform(self) -> bool:
        """Whether all sequences are equally long."""
        return len(set(self.lengths)) == 1

    def mean_weights(self, dtype: torch.dtype) -> Tensor:
        """[sequences, T]: multiplied with values of the tokens it gives the mean over each sequence."""
        device = self.positions_T.device
        lengths = torch.tensor(self.lengths, device=device)
        owner_T = torch.repeat_interleave(
            torch.arange(len(self.lengths), device=device), lengths, output_size=self.tokens
        )
        weights = torch.zeros(len(self.lengths), self.tokens, dtype=dtype, device=device)
        return weights.scatter_(0, owner_T.unsqueeze(0), (1.0 / lengths.to(dtype))[owner_T].unsqueeze(0))

    def last_tokens(self) -> Tensor:
        """Index of the last token of each sequence, int64."""
        return torch.tensor(self.lengths, device=self.positions_T.device).cumsum(0) - 1

    @property
    def tokens(self) -> int:
        """Tokens in the batch."""
        return self.positions_T.shape[0]


def attention_dtype(tensor: Tensor) -> torch.dtype:
    """The type in which query, key and value have to be handed to ``core_attention``."""
    slow = tensor.dtype is torch.bfloat16 and not stock_bf16(tensor.device)
    return torch.float32 if slow else tensor.dtype


def widen(tensor: Tensor, width: int) -> Tensor:
    """Append zero columns up to ``width``."""
    return tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))


def core_attention(
    query_TND: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor | None = None,
    *,
    sequences: Sequences,
    scale: float,
    columns: int,
    out_dtype: torch.dtype,
    ran: Counter[Kernel] | None = None,
) -> Tensor:
    """Causal attention inside each sequence -> the first ``columns`` columns, [T, N, columns], rounded to out_dtype.

    Without a value the key is the value. A single key head serves all query heads by expansion, without a copy.
    ``ran`` counts the kernels that ran, of calls that record a gradient.
    """
    value_TGD = key_TGD if value_TGD is None else value_TGD
    if sequences.uniform:
        return _attend(query_TND, key_TGD, value_TGD, len(sequences.lengths), scale, ran)[..., :columns].to(out_dtype)
    parts = zip(*(tensor.split(sequences.lengths) for tensor in (query_TND, key_TGD, value_TGD)), strict=True)
    return torch.cat([_attend(q, k, v, 1, scale, ran)[..., :columns].to(out_dtype) for q, k, v in parts])


def _attend(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, rows: int, scale: float, ran: Counter[Kernel] | None
) -> Tensor:
    heads = query_TND.shape[1]
    query_BNSD, key_BNSD, value_BNSD = (
        tensor.unflatten(0, (rows, -1)).transpose(1, 2).expand(-1, heads, -1, -1)
        for tensor in (query_TND, key_TGD, value_TGD)
    )
    out_BNSD = scaled_dot_product_attention(query_BNSD, key_BNSD, value_BNSD, is_causal=True, scale=scale)
    if ran is not None and out_BNSD.grad_fn is not None:
        backend = backend_of(out_BNSD, (query_BNSD, key_BNSD, value_BNSD))
        ran[Kernel(backend, str(query_TND.dtype).removeprefix("torch."), query_TND.shape[-1])] += 1
    return out_BNSD.transpose(1, 2).flatten(0, 1)


def backend_of(out: Tensor, inputs: Iterable[Tensor]) -> str:
    """Which kernel of scaled_dot_product_attention made ``out``: flash, efficient, cudnn, overrideable or math.

    Read off the graph between ``out`` and ``inputs``: a fused kernel is one node with a name of its own, possibly
    behind slices of padded columns; the unfused path is made of products and a softmax.
    """
    ends = {tensor.grad_fn for tensor in inputs}
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in ends or node in seen:
            continue
        seen.add(node)
        for word, backend in _FUSED.items():
            if word in node.name():
                return backend
        nodes += [before for before, _ in node.next_functions]
    return "math"


_FUSED = {
    "DotProductFlashAttention": "flash",
    "DotProductEfficientAttention": "efficient",
    "DotProductCudnnAttention": "cudnn",
    "DotProductFusedAttentionOverrideable": "overrideable",
}
