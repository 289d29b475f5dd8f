"""Embeddings without a model: hashed words, word bigrams and character trigrams."""

import re
import zlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import ConfigError

__all__ = ["hashed_ngrams"]

WORD = re.compile(r"\w+|[^\w\s]")
WORD_WEIGHT = 3
"""Whole words weigh more than the trigrams they share with other words."""


def hashed_ngrams(texts: Sequence[str], dim: int = 256) -> NDArray[np.float32]:
    """One unit vector per text, shape (texts, dim), the same on every machine.

    Texts that share words, bigrams or trigrams lie close to each other. Case is ignored. All
    sums are of integers, so nothing depends on their order.

    >>> near, same, far = hashed_ngrams(["How far is Rome?", "how far is rome?", "2 + 2"], 64)
    >>> bool((near == same).all()), bool(near @ far < 0.5)
    (True, True)
    """
    if dim < 2:
        raise ConfigError(f"dim must be at least 2, got {dim}")
    rows = np.empty((len(texts), dim), np.float32)
    for number, text in enumerate(texts):
        # A list, because single elements of an array are slow to update.
        places = [0] * dim
        for gram, weight in _grams(text):
            hashed = zlib.crc32(gram.encode("utf-8", "surrogatepass"))
            # Colliding grams cancel as often as they add up, so the sums stay unbiased.
            places[(hashed >> 1) % dim] += weight if hashed & 1 else -weight
        rows[number] = places if any(places) else [1] + [0] * (dim - 1)
    norms: NDArray[np.float32] = np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    return rows / norms


def _grams(text: str) -> list[tuple[str, int]]:
    words = ["<", *WORD.findall(text.lower()), ">"]
    grams = [(f"w {word}", WORD_WEIGHT) for word in words[1:-1]]
    grams += [(f"p {a} {b}", 1) for a, b in pairwise(words)]
    for word in words[1:-1]:
        framed = f"<{word}>"
        grams += [(f"l {framed[i : i + 3]}", 1) for i in range(len(framed) - 2)]
    return grams
