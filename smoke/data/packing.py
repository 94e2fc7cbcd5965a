"""Documents to batches: fixed rows (sbhd) and packs of whole sequences (thd). Pure functions on NumPy arrays.

Documents are uint16 arrays that end with the separator. Both layouts read them cyclically, in a new order each time
round, so that a small file serves any number of steps.

* sbhd: all documents make one stream; row r is its tokens ``r * S .. r * S + S`` (S + 1 of them: neighbours share one),
  tokens are the first S and labels the last S. Rows, not documents, are shuffled, so that a batch mixes documents;
  the order of the documents is kept inside the stream, and the last tokens that fill no row are dropped.
* thd: documents are cut to sequences of varied length, these are shuffled and put one after another into packs of
  exactly T tokens. The last sequence of a pack is cut to fit and goes on, as a new sequence, in the next one. No label
  crosses a sequence's end. A rest of one token would carry no label and is dropped; a pack with one token to spare
  still takes a sequence of length one. Where a pack is cut depends on lengths alone, never on the tokens.

Every choice is made from (seed, counter), so the first batches do not depend on how many are asked for.

Shape letters: B rows, S tokens of a row, T tokens of a pack, C sequence edges of a pack (one more than sequences).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from smoke.data.counter import between, permutation, words

IGNORED = -100
"""Label that no loss counts (the default of ``torch.nn.functional.cross_entropy``)."""


def visits(count: int, *, seed: int, shuffle: bool) -> Iterator[int]:
    """0..count-1 over and over, in a new order each time round (or always ascending); never ends."""
    for epoch in itertools.count():
        yield from (permutation(count, seed, "order", part=epoch) if shuffle else range(count))


def row_count(tokens: int, sequence_length: int) -> int:
    """Rows that a stream of ``tokens`` tokens gives."""
    return max(0, (tokens - 1) // sequence_length)


def rows(stream: np.ndarray, order: Iterable[int], sequence_length: int) -> Iterator[np.ndarray]:
    """Rows [S + 1] of the stream, in the given order of row numbers."""
    for row in order:
        yield stream[row * sequence_length : (row + 1) * sequence_length + 1]


def row_batch(rows_of_batch: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """B rows [S + 1] to tokens, labels, positions, each int64 [B, S]; every label counts."""
    row_BS1 = np.stack(rows_of_batch).astype(np.int64)
    tokens_BS, labels_BS = row_BS1[:, :-1].copy(), row_BS1[:, 1:].copy()
    positions_BS = np.broadcast_to(np.arange(tokens_BS.shape[1]), tokens_BS.shape).copy()
    return {"tokens": tokens_BS, "labels": labels_BS, "positions": positions_BS}


def loss_counts(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """What the terms of a batch's loss are means over, int64 [3]: labels, labels with a next one, sequences.

    A label has a next one, which the multi-token prediction learns, where the token behind it is of the same sequence
    and neither label is ignored.
    """
    counts = batch["labels"] != IGNORED
    pairs = counts[..., :-1] & counts[..., 1:]
    if "cu_seqlens" not in batch:
        return np.array([counts.sum(), pairs.sum(), len(counts)])
    edges = batch["cu_seqlens"]
    pairs[edges[1:-1] - 1] = False
    return np.array([counts.sum(), pairs.sum(), len(edges) - 1])


def longest_sequence(sequence_length: int, pack_tokens: int) -> int:
    """Longest sequence of a pack: ``sequence_length``, or less where a pack would hold fewer than three of them."""
    return min(sequence_length, max(2, pack_tokens // 3))


def sequences(documents: Iterable[np.ndarray], *, longest: int, seed: int) -> list[np.ndarray]:
    """Cut documents to pieces of 2 to ``longest`` tokens; cuts are drawn from [longest / 8, longest]."""
    documents = list(documents)
    shortest = max(2, longest // 8)
    most = sum(len(document) // shortest + 1 for document in documents)
    cuts = iter(between(words(seed, "cut", most), shortest, longest).tolist())
    pieces = []
    for document in documents:
        rest = document
        while len(rest) > 1:
            cut = next(cuts)
            pieces.append(rest[:cut])
            rest = rest[cut:]
    return pieces


def packs(pieces: Iterable[np.ndarray], pack_tokens: int) -> Iterator[list[np.ndarray]]:
    """Fill packs of exactly ``pack_tokens`` tokens, in order. Ends with the pieces; a pack not full is not given."""
    pack: list[np.ndarray] = []
    space = pack_tokens
    for piece in pieces:
        rest = piece
        while len(rest) > 1:
            pack.append(rest[:space])
            rest = rest[space:]
            space -= len(pack[-1])
            if space == 0:
                yield pack
                pack, space = [], pack_tokens


def pack_batch(pack: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Sequences to tokens, labels, positions (int64 [T]) and cu_seqlens (int32 [C], from 0 to T, ascending)."""
    edges_C = np.cumsum([0, *(len(sequence) for sequence in pack)])
    tokens_T = np.concatenate(pack).astype(np.int64)
    labels_T = np.append(tokens_T[1:], IGNORED)
    labels_T[edges_C[1:] - 1] = IGNORED
    positions_T = np.arange(len(tokens_T)) - np.repeat(edges_C[:-1], np.diff(edges_C))
    return {
        "tokens": tokens_T,
        "labels": labels_T,
        "positions": positions_T.astype(np.int64),
        "cu_seqlens": edges_C.astype(np.int32),
    }
