"""Samples become requests with ids and seeds of their own; results become records that can be scored again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from specbench.errors import UserError
from specbench.evals.answers import SCORERS
from specbench.evals.registry import load_task
from specbench.evals.task import EvalModel, Task, measured_requests, rescore, score_result, warmup_requests
from specbench.generate import GenerateRequest, GenerateResult
from specbench.records import RequestRecord, SampleRecord
from specbench.run_config import EvalConfig, SamplingConfig


@pytest.fixture
def task(eval_config: Callable[..., EvalConfig], write_jsonl: Callable[..., str]) -> Task:
    rows = [{"question": f"{n}?", "answer": f"#### {n}"} for n in (10, 11, 12)]
    return load_task(eval_config(data=write_jsonl(rows), stop=("END",)), EvalModel(is_packaged=False))


def answer(
    request: GenerateRequest, text: str, finish_reason: str = "stop", error: str | None = None
) -> GenerateResult:
    record = RequestRecord(
        request_id=request.request_id,
        sample_id=request.sample_id,
        turn=request.turn,
        repeat=request.repeat,
        is_warmup=request.is_warmup,
        category=request.category,
        num_prompt_tokens=2,
        num_cached_prompt_tokens=0,
        num_output_tokens=3,
        finish_reason=finish_reason,
        arrival_s=0.0,
        first_scheduled_s=0.0,
        first_token_s=0.1,
        last_token_s=0.2,
        num_preemptions=0,
        error=error,
    )
    return GenerateResult(record, [], [1, 2], [3, 4, 5], text, "thinking: 99", "the prompt")


def test_requests_repeat_by_repeat(task: Task, sampling: SamplingConfig) -> None:
    requests = measured_requests(task, sampling, repeats=2)
    assert [request.request_id for request in requests] == [
        "gsm8k-0000-t0-r0",
        "gsm8k-0001-t0-r0",
        "gsm8k-0002-t0-r0",
        "gsm8k-0000-t0-r1",
        "gsm8k-0001-t0-r1",
        "gsm8k-0002-t0-r1",
    ]
    assert [request.sampling.seed for request in requests] == [7, 7, 7, 8, 8, 8]
    first = requests[0]
    assert (first.sampling.temperature, first.sampling.max_output_tokens, first.sampling.stop) == (1.0, 64, ("END",))
    assert first.messages == task.samples[0].messages
    assert first.prompt is None
    assert not first.is_warmup


def test_warmups_come_from_the_end_and_have_ids_of_their_own(task: Task, sampling: SamplingConfig) -> None:
    warmups = warmup_requests(task, sampling, 4)
    assert [request.sample_id for request in warmups] == ["gsm8k-0002", "gsm8k-0001", "gsm8k-0000", "gsm8k-0002"]
    assert all(request.is_warmup and request.request_id.startswith("warmup-") for request in warmups)
    ids = [request.request_id for request in warmups + measured_requests(task, sampling)]
    assert len(set(ids)) == len(ids)
    assert warmup_requests(task, sampling, 0) == []


def test_the_answer_is_scored_by_all_and_reasoning_by_none(task: Task, sampling: SamplingConfig) -> None:
    request = measured_requests(task, sampling)[1]
    sample = score_result(task, answer(request, "It is 11."))
    assert set(sample.extracted) == set(sample.score) == set(SCORERS)
    assert (sample.extracted["robust"], sample.score["robust"]) == ("11", 1.0)
    assert (sample.extracted["official"], sample.score["official"]) == (None, 0.0)
    assert (sample.reference, sample.prompt, sample.prompt_token_ids) == ("11", "the prompt", [1, 2])
    assert sample.reasoning_text == "thinking: 99"
    assert not sample.is_truncated
    cut = score_result(task, answer(request, "", finish_reason="length"))
    assert cut.is_truncated
    assert cut.extracted["robust"] is None
    assert cut.score["robust"] == 0.0


def test_a_failed_request_is_wrong(task: Task, sampling: SamplingConfig) -> None:
    request = measured_requests(task, sampling)[0]
    sample = score_result(task, answer(request, "10", finish_reason="error", error="out of memory"))
    assert (sample.extracted["robust"], sample.score["robust"]) == (None, 0.0)
    assert sample.output_text == "10"


def test_prompts_are_not_scored(
    prompts_config: Callable[..., EvalConfig], write_jsonl: Callable[..., str], sampling: SamplingConfig
) -> None:
    data = write_jsonl([{"prompt_token_ids": [1, 2]}])
    task = load_task(prompts_config(data=data), EvalModel(is_packaged=False))
    request = measured_requests(task, sampling)[0]
    assert request.prompt_token_ids == (1, 2)
    result = dataclasses.replace(answer(request, "10"), prompt_text=None)
    sample = score_result(task, result)
    assert (sample.extracted, sample.score, sample.prompt, sample.prompt_token_ids) == ({}, {}, None, [1, 2])
    with pytest.raises(UserError, match="no sample has a reference answer"):
        rescore([sample], "robust")


def test_scoring_again(task: Task, sampling: SamplingConfig) -> None:
    request = measured_requests(task, sampling)[0]
    sample = score_result(task, answer(request, "#### 10"))
    stale = dataclasses.replace(sample, score=sample.score | {"boxed": 1.0, "robust": 0.0}, extracted={})
    (again,) = rescore([stale], "robust")
    assert (again.score["robust"], again.extracted["robust"]) == (1.0, "10")
    assert again.score["boxed"] == 1.0
    assert isinstance(again, SampleRecord)
    with pytest.raises(UserError, match="did you mean 'boxed'"):
        rescore([sample], "boxd")
