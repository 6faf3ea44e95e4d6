"""lm-eval as the judge of a run: its filters, metrics and tables over the records.

Belongs here: asking lm-eval again with the recorded answers, and turning what it says into records. Does not belong
here: loading tasks (lm_eval_tasks.py), lm-eval's model interface (lm_eval_adapter.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from specbench.evals.task import Judged, Sample
from specbench.records import SampleRecord, TaskResult
from specbench.run_config import EvalConfig

if TYPE_CHECKING:
    from specbench.evals.lm_eval_adapter import Asked

#: lm-eval's own seed of few-shot examples.
FEWSHOT_SEED = 1234
#: What its filters say where they found nothing.
INVALID = "[invalid]"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """lm-eval and datasets draw progress bars and log much."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            yield
        finally:
            logger.setLevel(level)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """Gives the records of a whole run to lm-eval."""

    config: EvalConfig
    loaded: dict[str, Any]
    asked: list[Asked]

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for one in self.asked for sample in one.samples)

    def __call__(self, records: Sequence[SampleRecord]) -> Judged:
        """Scores with each document's first record, and lm-eval's table; repeat by repeat."""
        judged = list(records)
        results: list[TaskResult] = []
        for repeat in sorted({record.repeat for record in records}):
            place = {record.sample_id: index for index, record in enumerate(judged) if record.repeat == repeat}
            found = self._evaluate({name: judged[index] for name, index in place.items()})
            for name, (extracted, score) in self._by_document(found["samples"]).items():
                if name in place:
                    record = judged[place[name]]
                    judged[place[name]] = dataclasses.replace(record, extracted=extracted, score=score)
            results += _table(found, repeat)
        return Judged(judged, results)

    def _evaluate(self, records: dict[str, SampleRecord]) -> dict[str, Any]:
        from lm_eval.evaluator import evaluate

        from specbench.evals.lm_eval_adapter import RecordedLM

        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)  # the same shots once more
        is_chat = self.config.protocol == "chat"
        with quiet():
            found = evaluate(
                RecordedLM(self.asked, records),
                self.loaded,
                limit=self.config.num_samples,
                bootstrap_iters=0,  # a pool of processes, for what is computed below
                log_samples=True,
                system_instruction=self.config.instruction,
                apply_chat_template=is_chat,
                fewshot_as_multiturn=is_chat,
            )
        assert found is not None
        return dict(found)

    def _by_document(self, logged: dict[str, list[dict]]) -> dict[str, tuple[dict, dict]]:
        """Name of the first sample of a document -> what was extracted and scored, filter by filter."""
        first = {one.key[:2]: one.samples[0].sample_id for one in self.asked if one.is_first_of_document}
        by_document: dict[str, tuple[dict, dict]] = {}
        for task, entries in logged.items():
            for entry in entries:
                extracted, score = by_document.setdefault(first[task, entry["doc_id"]], ({}, {}))
                said = _said(entry["filtered_resps"])
                for metric in entry["metrics"]:
                    name = f"{metric}/{entry['filter']}"
                    if (value := _share(entry[metric])) is not None:
                        extracted[name], score[name] = said, value
        return by_document


def _said(responses: Sequence[Any]) -> str | None:
    """What a filter left of a document's responses, as text; None where it found nothing."""
    if len(responses) == 1 and isinstance(responses[0], str):
        return None if responses[0] == INVALID else responses[0]
    return json.dumps(responses, default=str)


def _share(value: Any) -> float | None:
    """A score in 0..1; None for what is none, such as a perplexity."""
    number = _number(value)
    return number if number is not None and 0 <= number <= 1 else None


def _number(value: Any) -> float | None:
    """numpy's numbers, too; a text such as "N/A" is none, nor is what an aggregation takes apart."""
    try:
        return None if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return None


def _table(found: dict[str, Any], repeat: int) -> list[TaskResult]:
    """lm-eval's table: a row for each task or group, metric and filter."""
    rows = []
    for task, metrics in found["results"].items():
        counts = found["n-samples"].get(task, {})
        for name, value in metrics.items():
            metric, comma, filter_name = name.partition(",")
            if not comma or metric.endswith("_stderr") or (number := _number(value)) is None:
                continue
            rows.append(
                TaskResult(
                    task=task,
                    version=str(found["versions"].get(task, "")),
                    filter=filter_name,
                    num_fewshot=found["n-shot"].get(task),
                    metric=metric,
                    value=number if math.isfinite(number) else None,
                    stderr=_stderr(found["samples"].get(task, []), metric, filter_name, number),
                    num_samples=counts.get("effective"),
                    higher_is_better=(found.get("higher_is_better", {}).get(task) or {}).get(metric),
                    repeat=repeat,
                )
            )
    return rows


def _stderr(entries: Sequence[dict], metric: str, filter_name: str, mean: float) -> float | None:
    """Standard error of a mean, as lm-eval gives it; None for what is no mean of its samples."""
    values = [
        float(entry[metric])
        for entry in entries
        if entry["filter"] == filter_name and metric in entry and isinstance(entry[metric], int | float)
    ]
    if len(values) < 2 or not math.isclose(statistics.fmean(values), mean, rel_tol=1e-9, abs_tol=1e-12):
        return None
    return statistics.stdev(values) / math.sqrt(len(values))
