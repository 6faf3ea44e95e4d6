"""Event logs whose figures are those of a pull request's tables: built from its counts and its times.

Nothing is stored: steps are dealt to requests until every request has its tokens, and gaps between them are laid out so
that medians and 99th percentiles fall where the tables have them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specbench.record_columns import VerifyStepColumns
from specbench.run_directory import EventLog
from tests.reports.event_logs import make_request

#: Shares of a request's gaps: at the median, and at the 99th percentile. The rest takes up what time is left.
AT_MEDIAN, AT_P99 = 0.53, 0.02


@dataclass(frozen=True)
class Times:
    """Median and 99th percentile in ms; an absent p99 is the median's."""

    p50: float
    p99: float | None = None

    @property
    def top(self) -> float:
        return self.p50 if self.p99 is None else self.p99


@dataclass(frozen=True)
class Reference:
    """One column of a table."""

    num_requests: int
    num_output_tokens: int
    drafts: int
    #: [k] Steps with accepted > i.
    accepted_at: list[int]
    duration_s: float
    ttft: Times
    tpot: Times
    itl: Times | None = None
    e2el: Times | None = None
    categories: list[str | None] = field(default_factory=list)

    @property
    def k(self) -> int:
        return len(self.accepted_at)

    @property
    def histogram(self) -> np.ndarray:
        """[k + 1] Steps with exactly j accepted."""
        at_least = np.array([self.drafts, *self.accepted_at, 0])
        return at_least[:-1] - at_least[1:]


def positions(drafts: int, percents: list[float], accepted: int, digits: int = 2) -> list[int]:
    """Counts that round to `percents` of `drafts` and sum to `accepted`."""
    half = 0.5 * 10.0**-digits
    low = np.array([int(np.ceil((one - half) / 100 * drafts + 1e-6)) for one in percents])
    high = np.array([int(np.floor((one + half) / 100 * drafts - 1e-6)) for one in percents])
    assert low.sum() <= accepted <= high.sum(), (low.sum(), accepted, high.sum())
    room = (accepted - low.sum()) / (high - low).sum()
    counts = low + np.floor(room * (high - low)).astype(int)
    for index in np.flatnonzero(counts < high)[: accepted - counts.sum()]:
        counts[index] += 1
    return [int(one) for one in counts]


def reference_log(reference: Reference) -> EventLog:
    """The event log: one request a sample, times that give its percentiles."""
    num_tokens = even(reference.num_output_tokens, reference.num_requests)
    verified = int(reference.histogram @ np.arange(1, reference.k + 2))
    discarded = even(verified + reference.num_requests - reference.num_output_tokens, reference.num_requests)
    accepted = _dealt(reference.histogram, num_tokens - 1 + discarded, discarded)
    ttft, tpot = _request_times(reference, num_tokens)
    log = EventLog()
    pieces = []
    for index, steps in enumerate(accepted):
        gaps = _gaps(len(steps), tpot[index] * (num_tokens[index] - 1), reference.itl)
        e2el_s = (ttft[index] + gaps.sum()) / 1000
        arrival_s = reference.duration_s - e2el_s if index == 1 else 0.0
        first_token_s = arrival_s + ttft[index] / 1000
        end_s = first_token_s + np.cumsum(gaps) / 1000
        log.requests.append(
            make_request(
                f"r{index}",
                num_output_tokens=int(num_tokens[index]),
                arrival_s=arrival_s,
                first_token_s=first_token_s,
                last_token_s=float(end_s[-1]),
                category=reference.categories[index] if reference.categories else None,
            )
        )
        pieces.append((index, steps, discarded[index], end_s))
    log.verify_steps = _columns(pieces, reference.k)
    return log


def even(total: int, parts: int) -> np.ndarray:
    """[parts] Whole numbers that sum to `total` and differ by at most 1."""
    edges = np.arange(parts + 1) * total // parts
    return np.diff(edges)


def _dealt(histogram: np.ndarray, targets: np.ndarray, discarded: np.ndarray) -> list[np.ndarray]:
    """For each request, accepted counts of its steps, which yield its target; all steps of the histogram are used."""
    rng = np.random.default_rng(0)
    sizes = np.arange(1, len(histogram) + 1)
    pool, dealt = histogram.copy(), []
    for index, target in enumerate(targets):
        taken = pool.copy()
        if index < len(targets) - 1:
            taken = (pool * (target / (pool @ sizes))).astype(int)
            while gap := target - taken @ sizes:
                fitting = np.flatnonzero((sizes <= gap) & (pool > taken))
                taken[fitting[np.argmax((pool - taken)[fitting])]] += 1
        assert taken @ sizes == target
        pool -= taken
        steps = rng.permutation(np.repeat(np.arange(len(histogram)), taken))
        last = np.flatnonzero(steps >= discarded[index])[-1]
        steps[[last, -1]] = steps[[-1, last]]
        dealt.append(steps)
    return dealt


def _request_times(reference: Reference, num_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[num_requests] TTFT and TPOT in ms. Few requests have the long TTFT, few others the long TPOT."""
    count = reference.num_requests
    num_top = count - int(0.99 * (count - 1))
    ttft = np.full(count, reference.ttft.p50)
    tpot = np.full(count, reference.tpot.p50)
    ttft[:num_top] = reference.ttft.top
    tpot[num_top : 2 * num_top] = reference.tpot.top
    if reference.e2el is None:
        return ttft, tpot
    gaps = num_tokens - 1
    tpot[:num_top] = (reference.e2el.top - reference.ttft.top) / gaps[:num_top]
    middle = slice(2 * num_top, 2 * num_top + count // 5)
    ttft[middle] = reference.e2el.p50 - reference.tpot.p50 * gaps[middle]
    rest = np.arange(middle.stop, count)
    low, high = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    tpot[low] = 0.98 * np.minimum(tpot[low], (reference.e2el.p50 - reference.ttft.p50) / gaps[low])
    tpot[high] = 1.01 * np.maximum(tpot[high], (reference.e2el.p50 - reference.ttft.p50) / gaps[high])
    return ttft, tpot


def _gaps(count: int, total: float, itl: Times | None) -> np.ndarray:
    """[count] Gaps in ms that sum to `total`."""
    if itl is None:
        return np.full(count, total / count)
    at_median, at_p99 = round(AT_MEDIAN * count), round(AT_P99 * count) if itl.p99 else 0
    left = count - at_median - at_p99
    other = (total - at_median * itl.p50 - at_p99 * itl.top) / left
    assert other > 0 and (itl.p99 is None or other <= itl.p99), (other, itl)
    gaps = np.repeat([itl.p50, itl.top, other], [at_median, at_p99, left])
    return np.random.default_rng(count).permutation(gaps)


def _columns(pieces: list[tuple[int, np.ndarray, int, np.ndarray]], k: int) -> VerifyStepColumns:
    lengths = [len(steps) for _, steps, _, _ in pieces]
    accepted = np.concatenate([steps for _, steps, _, _ in pieces])
    discarded = np.zeros(len(accepted), np.int64)
    discarded[np.cumsum(lengths) - 1] = [one for _, _, one, _ in pieces]
    emitted = accepted + 1 - discarded
    step = np.concatenate([np.arange(length) for length in lengths])
    before = np.cumsum(emitted) - emitted
    first = np.repeat(before[np.cumsum(lengths) - lengths], lengths)
    return VerifyStepColumns(
        request_ids=[f"r{index}" for index, _, _, _ in pieces],
        request=np.repeat(np.arange(len(pieces)), lengths),
        step=step,
        engine_step=step,
        output_index=1 + before - first,
        num_drafted=np.full(len(accepted), k),
        num_accepted=accepted,
        num_emitted=emitted,
        num_discarded=discarded,
        is_trimmed=discarded > 0,
        batch_size=np.ones(len(accepted), np.int64),
        end_s=np.concatenate([end_s for _, _, _, end_s in pieces]),
    )
