"""The `intervals` block of metrics.json: how far one run's acceptance figures could be off, by its samples.

Belongs here: which figures have an interval. Does not belong here: resampling (statistics.py), sums (sample_sums.py),
accuracy, whose interval stands beside it in `eval`.
"""

from __future__ import annotations

from specbench.reports.conditions import condition_sums
from specbench.reports.sample_sums import acceptance_sums, category_sums
from specbench.reports.statistics import metric_intervals
from specbench.reports.step_columns import StepColumns


def acceptance_intervals(columns: StepColumns, num_speculative_tokens: int | None) -> dict[str, list[float]]:
    """Metric path to [low, high], 95 %. A figure without an interval is not in it; none without speculation."""
    if num_speculative_tokens is None:
        return {}
    everything = acceptance_sums(columns, num_speculative_tokens)
    by_category = category_sums(columns, num_speculative_tokens)
    return {
        path: list(interval)
        for one in (everything, *by_category.values(), *condition_sums(columns, num_speculative_tokens))
        for path, interval in zip(one.paths, metric_intervals(one.sums, one.ratios), strict=True)
        if interval is not None
    }
