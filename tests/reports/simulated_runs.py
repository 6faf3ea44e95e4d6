"""Greedy runs over given texts whose drafts are right or wrong by a given table: one table, any k."""

from __future__ import annotations

import numpy as np

from specbench.reports.drafted_run import DraftedRun
from specbench.reports.step_columns import NO_PREVIOUS, StepColumns
from tests.reports.event_logs import make_request, make_sample


def draft_hits(num_samples: int, num_tokens: int, k: int, rng: np.random.Generator, spread: float = 0.7) -> np.ndarray:
    """[num_samples, num_tokens, k] Whether module m is right about a token: easy texts, and easy passages within."""
    ease = rng.normal(1.0, spread, num_samples)
    mood = rng.normal(0.0, 1.0, num_samples)
    hits = np.zeros((num_samples, num_tokens, k), bool)
    for token in range(num_tokens):
        mood = 0.9 * mood + 0.44 * rng.normal(0.0, 1.0, num_samples)
        hits[:, token] = rng.random((num_samples, k)) < 1 / (1 + np.exp(-(ease + 1.5 * mood)))[:, None]
    return hits


def drafted_run(label: str, hits: np.ndarray, num_repeats: int = 1, texts: np.ndarray | None = None) -> DraftedRun:
    """A run that drafts k tokens a step, given hits [num_texts, num_tokens, k]; the first token is no step's.

    Text t is of sample t // num_repeats. `texts` [num_texts, num_tokens] are token ids; by default the same in any run.
    """
    num_texts, num_tokens, k = hits.shape
    rows = _steps(hits)
    text, output_index, accepted = rows[:, 0], rows[:, 1], rows[:, 2]
    follows = np.zeros(len(rows), bool)
    follows[1:] = text[1:] == text[:-1]
    step = np.arange(len(rows)) - np.flatnonzero(~follows)[np.cumsum(~follows) - 1]
    emitted = np.minimum(accepted + 1, num_tokens - output_index)
    keys = [(f"s{index // num_repeats}", index % num_repeats) for index in range(num_texts)]
    ids = np.broadcast_to(np.arange(num_tokens), (num_texts, num_tokens)) if texts is None else texts
    columns = StepColumns(
        requests=[
            make_request(f"{name}-{repeat}", sample_id=name, repeat=repeat, num_output_tokens=num_tokens)
            for name, repeat in keys
        ],
        request=text,
        step=step,
        num_drafted=np.full(len(rows), k),
        num_accepted=accepted,
        num_emitted=emitted,
        num_discarded=accepted + 1 - emitted,
        is_trimmed=emitted < accepted + 1,
        end_s=step.astype(float),
        engine_step=step,
        output_index=output_index,
        batch_size=np.ones(len(rows), np.int64),
        previous=np.where(follows, np.roll(accepted, 1), NO_PREVIOUS),
        num_orphan_rows=0,
    )
    samples = [
        make_sample(name, None, repeat=repeat, output_token_ids=row)
        for (name, repeat), row in zip(keys, ids.tolist(), strict=True)
    ]
    return DraftedRun(label, k, columns, samples)


def _steps(hits: np.ndarray) -> np.ndarray:
    """[num_rows, 3] text, output index of the first emitted token, drafts accepted; by text, then in order."""
    num_texts, num_tokens, k = hits.shape
    padded = np.concatenate([hits, np.zeros((num_texts, k, k), bool)], axis=1)
    at, rows = np.ones(num_texts, np.int64), []
    while (at < num_tokens).any():
        text = np.flatnonzero(at < num_tokens)
        right = np.stack([padded[text, at[text] + module, module] for module in range(k)], axis=1)
        accepted = np.cumprod(right, axis=1).sum(axis=1)
        rows.append(np.stack([text, at[text], accepted], axis=1))
        at[text] += accepted + 1
    joined = np.concatenate(rows)
    return joined[np.lexsort((joined[:, 1], joined[:, 0]))]
