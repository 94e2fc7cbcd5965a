"""Synthetic documents whose entropy is known exactly, so that a loss can be held against its lower bound.

A first-order Markov chain over 32 symbols (ids 0..31) and the separator (id 256):

* after a symbol s: with probability 1/64 the separator, else ``(s + 1 + step) mod 32`` with step 0, 1, 2, 3 at
  probabilities 8/16, 4/16, 2/16, 2/16 (1.75 bits);
* after the separator, and at the very start: one of the 32 symbols, all alike.

The next token depends on the present one alone, so no model can do better on average than the chain's conditional
entropy: 1.275 nats after a symbol. Unigrams alone give about 3.5 nats and an untrained model ln(vocab_size), so a few
optimizer steps already show the loss falling.

Everything is made from integers (``smoke.data.counter``): the same tokens on every platform. A longer stream of the
same seed begins with the shorter one.
"""

from __future__ import annotations

import math

import numpy as np

from smoke.data.counter import words

SYMBOLS = 32
SEPARATOR = 256
_STEP_OF_NIBBLE = np.array([0] * 8 + [1] * 4 + [2] * 2 + [3] * 2)
_ENDING_BITS = 6
_ENDING = 2.0**-_ENDING_BITS


def _separators(ending: np.ndarray) -> np.ndarray:
    """Where the separator stands: at each ending, except at the start and right after another separator."""
    standing = np.zeros(len(ending), dtype=bool)
    last = -1
    for place in np.flatnonzero(ending).tolist():
        if place > last + 1:
            standing[place] = True
            last = place
    return standing


def chain(seed: int, tokens: int) -> np.ndarray:
    """The first ``tokens`` tokens of the chain, uint16 [tokens]."""
    word = words(seed, "generated", tokens)
    separator = _separators((word >> np.uint64(64 - _ENDING_BITS)) == 0)
    fresh = np.concatenate(([True], separator[:-1]))[:tokens]
    step = 1 + _STEP_OF_NIBBLE[((word >> np.uint64(54)) & np.uint64(15)).astype(np.int64)]
    # A uniform increment makes a uniform symbol whatever stood before it, so one running sum serves all documents.
    uniform = ((word >> np.uint64(49)) & np.uint64(SYMBOLS - 1)).astype(np.int64)
    symbol = np.cumsum(np.where(separator, 0, np.where(fresh, uniform, step))) % SYMBOLS
    return np.where(separator, SEPARATOR, symbol).astype(np.uint16)


def generated_documents(seed: int, tokens: int) -> list[np.ndarray]:
    """Complete documents, each uint16 and closed by the separator, of at least ``tokens`` tokens together."""
    stream = chain(seed, tokens + (64 << _ENDING_BITS))  # a document that long has probability e^-64
    return np.split(stream, np.flatnonzero(stream == SEPARATOR) + 1)[:-1]


def entropy_floor(layout: str) -> float:
    """Lowest possible mean loss, in nats per label, on documents of this chain.

    ``thd`` has no label whose context is the separator (a sequence begins there), ``sbhd`` has one for each document.
    The mean loss of a finite sample scatters about this value.
    """
    step = -sum(p * math.log(p) for p in np.bincount(_STEP_OF_NIBBLE) / len(_STEP_OF_NIBBLE))
    ending = -_ENDING * math.log(_ENDING) - (1 - _ENDING) * math.log1p(-_ENDING)
    after_symbol = ending + (1 - _ENDING) * step
    if layout == "thd":
        return after_symbol
    return (after_symbol + _ENDING * math.log(SYMBOLS)) / (1 + _ENDING)
