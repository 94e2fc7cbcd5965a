"""The generated stream: pinned bits, and an entropy floor that counting agrees with."""

import hashlib
import math

import numpy as np
import pytest

from smoke.data.counter import between, permutation, splitmix64, words
from smoke.data.generated import SEPARATOR, SYMBOLS, chain, entropy_floor, generated_documents


def test_splitmix64_known_answers():
    # The first outputs of the published reference implementation for the states 0 and 1234567.
    assert [hex(w) for w in splitmix64(0, 3)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]
    assert splitmix64(1234567, 2).tolist() == [6457827717110365317, 3203168211198807973]


def test_words_depend_on_every_part_of_their_key():
    streams = [words(1, "a", 4), words(2, "a", 4), words(1, "b", 4), words(1, "a", 4, part=1), words(-1, "a", 4)]
    assert len({tuple(stream.tolist()) for stream in streams}) == len(streams)
    assert words(1, "a", 9)[:4].tolist() == streams[0].tolist()


def test_between_reaches_both_ends_and_no_further():
    drawn = between(words(0, "test", 4000), 3, 7)
    assert set(drawn.tolist()) == {3, 4, 5, 6, 7}
    assert np.bincount(drawn)[3:].min() > 700
    assert between(np.array([0, 2**64 - 1], dtype=np.uint64), 3, 7).tolist() == [3, 7]


@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_permutation_is_one(count):
    assert sorted(permutation(count, 5, "order").tolist()) == list(range(count))


def test_the_stream_is_the_same_everywhere():
    digest = hashlib.sha256(chain(1234, 100_000).astype("<u2").tobytes()).hexdigest()
    assert digest == "9196831e642974ba3fbeb304df62b06e09c27719082bcffb3cfb987581ba1429"


def test_a_longer_stream_begins_with_the_shorter_one():
    assert np.array_equal(chain(7, 5000)[:300], chain(7, 300))
    assert not np.array_equal(chain(7, 300), chain(8, 300))
    assert [len(chain(7, n)) for n in (0, 1, 2)] == [0, 1, 2]


def test_documents_are_whole_and_long_enough():
    documents = generated_documents(3, 2000)
    assert sum(map(len, documents)) >= 2000
    for document in documents:
        assert document[-1] == SEPARATOR
        assert len(document) >= 2
        assert (document[:-1] < SYMBOLS).all()


def counted_entropy(context, label):
    """Mean of -ln p(label | context) under the counted frequencies, in nats."""
    joint = np.zeros((SEPARATOR + 1, SEPARATOR + 1))
    np.add.at(joint, (context, label), 1)
    rows = joint.sum(axis=1, keepdims=True)
    chance = np.divide(joint, rows, out=np.ones_like(joint), where=joint > 0)
    return -(joint * np.log(chance)).sum() / joint.sum()


def test_the_floor_is_the_chains_conditional_entropy():
    stream = chain(11, 400_000).astype(np.int64)
    context, label = stream[:-1], stream[1:]
    assert counted_entropy(context, label) == pytest.approx(entropy_floor("sbhd"), rel=3e-3)
    inside = context != SEPARATOR
    assert counted_entropy(context[inside], label[inside]) == pytest.approx(entropy_floor("thd"), rel=3e-3)


def test_floor_by_hand():
    ending = (math.log(64) + 63 * math.log(64 / 63)) / 64
    after_symbol = ending + 63 / 64 * 1.75 * math.log(2)
    assert entropy_floor("thd") == pytest.approx(after_symbol, rel=1e-14)
    assert entropy_floor("sbhd") == pytest.approx((64 * after_symbol + math.log(32)) / 65, rel=1e-14)


def test_there_is_something_to_learn_beyond_unigrams():
    stream = chain(11, 100_000).astype(np.int64)
    unigram = counted_entropy(np.zeros_like(stream), stream)
    assert 3.4 < unigram < 3.6
    assert entropy_floor("sbhd") < 0.4 * unigram
