"""Random words from a counter: the same on every platform, Python, NumPy and torch version.

Word i of a stream is a fixed mix of ``key + (i + 1) * increment``: any word can be made without those before it, and
nothing here touches a global random state. The mix is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014). NumPy's own generators are avoided on purpose: only their raw bits are promised to stay as
they are, not the numbers and permutations made from them.

Good for data order and synthetic data; not for cryptography.
"""

from __future__ import annotations

import numpy as np

_INCREMENT = 0x9E3779B97F4A7C15
_WORD = 1 << 64


def splitmix64(state: int, count: int) -> np.ndarray:
    """``count`` uint64 words that follow ``state`` (any integer, taken modulo 2^64)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_INCREMENT) + np.array([state % _WORD], dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def words(seed: int, purpose: str, count: int, *, part: int = 0) -> np.ndarray:
    """``count`` uint64 words; streams of another seed, purpose or part are unrelated, longer ones only continue."""
    key = int(splitmix64(seed, 1)[0])
    for number in (*purpose.encode("ascii"), part):
        key = int(splitmix64(key + number, 1)[0])
    return splitmix64(key, count)


def between(word: np.ndarray, low: int, high: int) -> np.ndarray:
    """Integers in [low, high], int64, from the words' upper 32 bits (bias below 2^-32 of the range)."""
    upper = word >> np.uint64(32)
    return (low + ((upper * np.uint64(high - low + 1)) >> np.uint64(32)).astype(np.int64)).astype(np.int64)


def permutation(count: int, seed: int, purpose: str, *, part: int = 0) -> np.ndarray:
    """A shuffled ``range(count)``, int64: the order of random keys, ties (none in practice) by position."""
    return np.argsort(words(seed, purpose, count, part=part), kind="stable")
