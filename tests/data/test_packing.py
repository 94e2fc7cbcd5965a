"""Rows and packs on streams small enough to read, and their rules on drawn ones."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoke.data.packing import (
    IGNORED,
    longest_sequence,
    pack_batch,
    packs,
    row_batch,
    row_count,
    rows,
    sequences,
    visits,
)


def numbered(*lengths):
    """Documents of consecutive numbers, so that every token tells where it came from."""
    edges = np.cumsum([0, *lengths])
    return [np.arange(a, b, dtype=np.uint16) for a, b in itertools.pairwise(edges)]


def test_rows_by_hand():
    stream = np.arange(8, dtype=np.uint16)
    assert row_count(8, 3) == 2
    batch = row_batch(list(rows(stream, [1, 0], 3)))
    assert batch["tokens"].tolist() == [[3, 4, 5], [0, 1, 2]]
    assert batch["labels"].tolist() == [[4, 5, 6], [1, 2, 3]]
    assert batch["positions"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int64)}


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 0), (3, 0), (4, 1), (6, 1), (7, 2)])
def test_row_count(tokens, count):
    assert row_count(tokens, 3) == count
    assert all(len(row) == 4 for row in rows(np.arange(tokens), range(count), 3))


def test_a_pack_by_hand():
    (first, second) = packs(numbered(3, 4, 6), 6)
    batch = pack_batch(first)
    assert batch["tokens"].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["labels"].tolist() == [1, 2, IGNORED, 4, 5, IGNORED]
    assert batch["positions"].tolist() == [0, 1, 2, 0, 1, 2]
    assert batch["cu_seqlens"].tolist() == [0, 3, 6]
    assert batch["cu_seqlens"].dtype == np.int32
    # Of the cut document one token was left, which has no label: it is dropped.
    assert np.concatenate(second).tolist() == [7, 8, 9, 10, 11, 12]


def test_a_cut_sequence_goes_on_in_the_next_pack():
    made = list(packs(numbered(9), 4))
    assert [[part.tolist() for part in pack] for pack in made] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_one_token_to_spare_is_a_sequence_of_its_own():
    (pack,) = packs(numbered(3, 4), 4)
    batch = pack_batch(pack)
    assert batch["cu_seqlens"].tolist() == [0, 3, 4]
    assert batch["labels"].tolist() == [1, 2, IGNORED, IGNORED]


def test_visits_come_round_in_a_new_order():
    order = list(itertools.islice(visits(50, seed=1, shuffle=True), 150))
    rounds = [order[:50], order[50:100], order[100:]]
    assert all(sorted(part) == list(range(50)) for part in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    assert list(itertools.islice(visits(3, seed=1, shuffle=False), 7)) == [0, 1, 2, 0, 1, 2, 0]
    assert order != list(itertools.islice(visits(50, seed=2, shuffle=True), 150))


lengths = st.lists(st.integers(1, 90), min_size=1, max_size=12)


@given(lengths, st.integers(2, 40), st.integers(0, 2**64))
def test_sequences_keep_order_and_lose_single_tokens_only(document_lengths, longest, seed):
    documents = numbered(*document_lengths)
    pieces = sequences(documents, longest=longest, seed=seed)
    assert all(2 <= len(piece) <= longest for piece in pieces)
    lost = set(range(sum(document_lengths))) - {int(token) for piece in pieces for token in piece}
    assert lost <= {int(document[-1]) for document in documents}
    flat = [int(token) for piece in pieces for token in piece]
    assert flat == sorted(flat)


@given(lengths, st.integers(2, 64))
def test_packs_are_full_and_their_labels_stay_inside(document_lengths, pack_tokens):
    for pack in packs(numbered(*document_lengths), pack_tokens):
        batch = pack_batch(pack)
        edges = batch["cu_seqlens"].tolist()
        assert edges[0] == 0
        assert edges[-1] == pack_tokens == len(batch["tokens"]) == len(batch["labels"])
        assert edges == sorted(set(edges))
        for begin, end in itertools.pairwise(edges):
            assert batch["positions"][begin:end].tolist() == list(range(end - begin))
            assert batch["labels"][begin : end - 1].tolist() == batch["tokens"][begin + 1 : end].tolist()
            assert batch["labels"][end - 1] == IGNORED


@given(st.integers(2, 600), st.integers(1, 8))
def test_a_pack_holds_three_sequences_where_it_can(sequence_length, rows_of_batch):
    pack_tokens = sequence_length * rows_of_batch
    longest = longest_sequence(sequence_length, pack_tokens)
    assert 2 <= longest <= sequence_length
    if pack_tokens >= 6:
        assert pack_tokens / longest >= 3


def test_lengths_vary():
    pieces = sequences(numbered(60_000), longest=256, seed=0)
    found = {len(piece) for piece in pieces}
    assert len(found) > 100
    assert min(found) < 64
    assert max(found) > 240
