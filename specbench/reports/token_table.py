"""Token ids of many samples in one array, and what repeats in them.

Belongs here: packing token ids and counting repeats. Does not belong here: thresholds (text_checks.py).

A run holds tens of millions of tokens, so at most MAX_TOKENS are packed, from samples that lie evenly over the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MAX_TOKENS = 1_000_000
#: Odd multiplier of the rolling hash; sums wrap at 2^64, so two different n-grams collide once in 10^19 pairs or so.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """Token ids of some of the samples, one after the other."""

    #: [num_packed] Index of each packed sample in the sequence that was given.
    index: np.ndarray
    #: [num_tokens]
    token_ids: np.ndarray
    #: [num_tokens] Which of the packed samples.
    sample: np.ndarray

    @property
    def num_packed(self) -> int:
        return len(self.index)

    @property
    def commonest_share(self) -> float | None:
        """Share of the most frequent token; None without tokens."""
        if len(self.token_ids) == 0:
            return None
        return float(np.unique(self.token_ids, return_counts=True)[1].max() / len(self.token_ids))

    @property
    def num_tokens(self) -> np.ndarray:
        """[num_packed]"""
        return np.bincount(self.sample, minlength=self.num_packed)

    @property
    def distinct_share(self) -> np.ndarray:
        """[num_packed] Distinct token ids over token ids; NaN without tokens."""
        return _share(self._num_distinct(self.token_ids.astype(np.uint64), self.sample), self.num_tokens)

    def repeated_ngram_share(self, size: int) -> np.ndarray:
        """[num_packed] Share of n-grams that occurred before in their sample; NaN where there is none."""
        num_grams = max(len(self.token_ids) - size + 1, 0)
        sample = self.sample[:num_grams]
        is_whole = sample == self.sample[size - 1 :]
        grams = self._hash(size, num_grams)[is_whole]
        sample = sample[is_whole]
        total = np.bincount(sample, minlength=self.num_packed)
        return 1 - _share(self._num_distinct(grams, sample), total)

    def _hash(self, size: int, num_grams: int) -> np.ndarray:
        """[num_grams] Polynomial hash of the n-gram that starts at each token."""
        ids = self.token_ids.astype(np.uint64) + np.uint64(1)
        value = np.zeros(num_grams, np.uint64)
        for offset in range(size):
            value = value * _MULTIPLIER + ids[offset : offset + num_grams]
        return value ^ (value >> np.uint64(29))

    def _num_distinct(self, values: np.ndarray, sample: np.ndarray) -> np.ndarray:
        """[num_packed] Distinct values within each sample."""
        keys = values * _MULTIPLIER + sample.astype(np.uint64)
        first = np.unique(keys, return_index=True)[1]
        return np.bincount(sample[first], minlength=self.num_packed)


def pack_tokens(token_lists: Iterable[Sequence[int]], limit: int = MAX_TOKENS) -> TokenTable:
    """Every sample, or every second, third, ... one, so that about `limit` tokens at most are packed."""
    lists = list(token_lists)
    stride = max(1, -(-sum(map(len, lists)) // limit))
    chosen = lists[::stride]
    lengths = [len(tokens) for tokens in chosen]
    return TokenTable(
        index=np.arange(0, len(lists), stride),
        token_ids=np.concatenate([np.zeros(0, np.int64), *(np.asarray(tokens, np.int64) for tokens in chosen)]),
        sample=np.repeat(np.arange(len(chosen)), lengths),
    )


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
