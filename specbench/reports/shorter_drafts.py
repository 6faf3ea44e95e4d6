"""How many tokens a step would have kept had it drafted fewer: the recorded text, cut into steps again.

Belongs here: the cutting. Does not belong here: what a step costs (cost_law.py).

A run with k drafts a step tells of each token whether its draft matched (accepted), did not (it followed a rejection),
or was never drafted (the bonus token behind full acceptance). With k' < k, steps start at other tokens; which ones is
found by walking each text: accept while the mark says so, up to k', then take one token more. This assumes that a
token's draft would be as right at another depth. Bonus tokens are marked by chance at the rate of position 0 after full
acceptance, and both ways for the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbench.reports.step_columns import StepColumns

#: Tokens that are walked at most, of requests that lie evenly over the run.
MAX_TOKENS = 1_000_000
_SEED = 20_261_130
#: Fewer drafts after full acceptance leave its rate to the deepest position's.
_MIN_DRAFTS = 20


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Tokens a step keeps with k drafts, the bonus token included, stops taken off."""

    k: int
    tokens: float
    #: With every token that was never drafted taken for a miss, and for a hit.
    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class _Texts:
    """Kept tokens behind the first one, of some requests one after the other."""

    #: [num_texts] First token and the one behind the last.
    start: np.ndarray
    end: np.ndarray
    #: [num_tokens]
    is_hit: np.ndarray
    #: Tokens that were never drafted.
    is_unknown: np.ndarray


def kept_tokens(columns: StepColumns, k: int) -> list[KeptTokens]:
    """For 0..k drafts a step; k itself is what was measured. Empty where nothing was kept."""
    texts = _texts(columns)
    if len(texts.is_hit) == 0:
        return []
    by_chance = np.random.default_rng(_SEED).random(len(texts.is_hit)) < _bonus_rate(columns, k)
    marks = [texts.is_hit | (texts.is_unknown & guess) for guess in (by_chance, np.False_, np.True_)]
    runs = [_run_length(texts, is_hit) for is_hit in marks]
    return [KeptTokens(drafts, *(_walk(texts, run, drafts) for run in runs)) for drafts in range(k + 1)]


def _texts(columns: StepColumns) -> _Texts:
    num_kept = np.bincount(columns.request, weights=columns.num_emitted, minlength=len(columns.requests))
    stride = max(1, -(-int(num_kept.sum()) // MAX_TOKENS))
    rows = np.flatnonzero((columns.request % stride == 0) & (columns.num_emitted > 0))
    emitted, accepted = columns.num_emitted[rows], columns.num_accepted[rows]
    last = np.cumsum(emitted) - 1
    is_hit = np.ones(int(emitted.sum()), bool)
    ends_in_target = emitted > accepted  # a row that was cut off behind a draft ends in a hit
    is_hit[last[ends_in_target]] = False
    is_unknown = np.zeros(len(is_hit), bool)
    is_unknown[last[ends_in_target & (accepted == columns.num_drafted[rows])]] = True
    lengths = np.bincount(columns.request[rows], weights=emitted).astype(np.int64)
    lengths = lengths[lengths > 0]
    end = np.cumsum(lengths)
    return _Texts(end - lengths, end, is_hit, is_unknown)


def _bonus_rate(columns: StepColumns, k: int) -> float:
    follows = columns.is_draft & (columns.previous == k)
    if follows.sum() >= _MIN_DRAFTS:
        return float((columns.num_accepted[follows] > 0).mean())
    reached = columns.is_draft & (columns.num_drafted >= k) & (columns.num_accepted >= k - 1)
    return float((columns.num_accepted[reached] >= k).mean()) if reached.any() else 0.0


def _run_length(texts: _Texts, is_hit: np.ndarray) -> np.ndarray:
    """[num_tokens] Hits in a row from each token on, within its text."""
    index = np.arange(len(is_hit))
    next_miss = np.minimum.accumulate(np.where(is_hit, len(is_hit), index)[::-1])[::-1]
    end = np.repeat(texts.end, texts.end - texts.start)
    return np.minimum(next_miss, end) - index


def _walk(texts: _Texts, run: np.ndarray, k: int) -> float:
    """Tokens over steps, all texts walked side by side."""
    place, end, num_steps = texts.start, texts.end, 0
    while len(place):
        num_steps += len(place)
        place = place + np.minimum(run[place], k) + 1
        goes_on = place < end
        place, end = place[goes_on], end[goes_on]
    return len(run) / num_steps
