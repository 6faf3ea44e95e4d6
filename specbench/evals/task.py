"""What an eval is: samples that become requests, and results that become scored records.

Belongs here: the Task and its samples, seeds and request ids, scoring and scoring again. Does not belong here: any one
eval's data or prompts (gsm8k.py, prompts.py), how an answer is read off a text (scorers.py), accuracy (reports/).

Randomness: a target keys a request's draws by (seed, sample_id, turn). Repeats must differ at T > 0, so repeat r runs
with seed sampling.seed + r; repeat 1 of seed 0 draws as repeat 0 of seed 1 does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from specbench.errors import UserError, near_name
from specbench.evals.scorers import SCORER_NAMES, score_text, scorers_for
from specbench.generate import AudioSource, GenerateRequest, GenerateResult, Message, SamplingParams
from specbench.records import DataIdentity, SampleRecord, TaskResult
from specbench.run_config import SamplingConfig


class RenderedPrompt(Protocol):
    """A prompt as the model sees it."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def text(self) -> str | None: ...


class PromptTokenizer(Protocol):
    """What an eval that counts tokens asks of the model's tokenizer."""

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def encode_chat(self, messages: Sequence[Message]) -> RenderedPrompt: ...


def _no_tokenizer() -> PromptTokenizer:
    raise UserError("model.tokenizer: the checkpoint has none, and this eval counts tokens; give model.tokenizer=PATH")


@dataclass(frozen=True, slots=True)
class EvalModel:
    """What an eval's data may depend on."""

    #: The model that comes with specbench: the packaged problems are made for it.
    is_packaged: bool
    max_model_len: int = 0
    #: The model's own; read only if the eval needs it.
    load_tokenizer: Callable[[], PromptTokenizer] = _no_tokenizer
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One thing to ask: exactly one of `prompt`, `messages` and `prompt_token_ids` is set.

    A turn above 0 has the messages behind the answer to the turn before it, which is asked first.
    """

    sample_id: str
    max_output_tokens: int
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    turn: int = 0
    #: The right answer; None where nothing can be scored.
    reference: str | None = None
    category: str | None = None
    audio: tuple[AudioSource, ...] = ()
    #: What there is to choose from; empty for an open question.
    choices: tuple[str, ...] = ()
    #: Dimension -> value, by which accuracy is given too; empty: by category alone.
    groups: Mapping[str, str] = field(default_factory=dict)
    #: None: the task's.
    stop: tuple[str, ...] | None = None
    #: Prompt token from which on the model's log-probabilities are summed; None where they are not asked for.
    scored_from: int | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """What a judge made of all records of a run."""

    samples: list[SampleRecord]
    results: list[TaskResult]


@dataclass(frozen=True)
class Task:
    """An eval, loaded and checked: ready to run."""

    name: str
    data: DataIdentity
    samples: tuple[Sample, ...]
    #: All that are computed, names of scorers.py; empty where nothing is scored.
    scorers: tuple[str, ...]
    #: The scorer whose accuracy is the run's.
    headline: str | None
    stop: tuple[str, ...]
    #: What the reader of any figure must know: fallbacks, fewer samples than asked for.
    notices: tuple[str, ...]
    #: Draws of each prompt's first tokens when the run is compared with plain decoding afterwards; None: it is not.
    num_law_draws: int | None = None
    #: Scores the records once all are there, in place of the scorers; None: each is scored as it comes.
    judge: Callable[[Sequence[SampleRecord]], Judged] | None = None

    @cached_property
    def sample_by_key(self) -> dict[tuple[str, int], Sample]:
        """(sample_id, turn) -> sample."""
        return {(sample.sample_id, sample.turn): sample for sample in self.samples}


def fewer_samples_notice(num_asked: int | None, num_available: int) -> tuple[str, ...]:
    """What to say where the data is smaller than eval.num_samples."""
    if num_asked is None or num_asked <= num_available:
        return ()
    return (f"eval.num_samples: {num_asked} asked for, the data has {num_available}: all of them run",)


def measured_requests(task: Task, sampling: SamplingConfig, repeats: int = 1) -> list[GenerateRequest]:
    """All samples, once a repeat, repeat by repeat."""
    return [
        _request(task, sample, sampling, repeat=repeat, request_id=_request_id(sample, sample.turn, repeat))
        for repeat in range(repeats)
        for sample in task.samples
    ]


def warmup_requests(task: Task, sampling: SamplingConfig, count: int) -> list[GenerateRequest]:
    """`count` requests to run before the measured ones: samples from the last backwards, over again if need be; of
    conversations the first turns.

    From the last, so that the first measured prompts are not the ones just seen.
    """
    requests = []
    samples = [sample for sample in task.samples if sample.turn == 0]
    for index in range(count):
        sample = samples[-1 - index % len(samples)]
        request_id = f"warmup-{index}-{sample.sample_id}-t{sample.turn}-r0"
        request = _request(task, sample, sampling, repeat=0, request_id=request_id)
        requests.append(dataclasses.replace(request, is_warmup=True))
    return requests


def score_result(task: Task, result: GenerateResult) -> SampleRecord:
    """The record of one finished request of `task`. A failed one has no answer, which is wrong."""
    record = result.record
    sample = task.sample_by_key[record.sample_id, record.turn]
    unscored = SampleRecord(
        sample_id=record.sample_id,
        turn=record.turn,
        repeat=record.repeat,
        prompt=result.prompt_text,
        prompt_token_ids=result.prompt_token_ids,
        output_text=result.output_text,
        reasoning_text=result.reasoning_text,
        output_token_ids=result.output_token_ids,
        reference=sample.reference,
        extracted={},
        score={},
        is_truncated=record.finish_reason == "length",
        category=sample.category,
        choices=list(sample.choices),
        groups=dict(sample.groups),
    )
    if record.error is not None:
        return unscored if task.judge is not None else _scored(unscored, task.scorers, "")
    unscored = _with_likelihood(unscored, sample, result)
    return unscored if task.judge is not None else _scored(unscored, task.scorers, result.output_text)


def _with_likelihood(record: SampleRecord, sample: Sample, result: GenerateResult) -> SampleRecord:
    """The record with what the model made of the prompt's scored tokens, where there are such."""
    if sample.scored_from is None or result.prompt_logprobs is None:
        return record
    scored = [logprob for logprob in result.prompt_logprobs[sample.scored_from :] if logprob is not None]
    return dataclasses.replace(
        record,
        loglikelihood=sum(logprob.logprob for logprob in scored),
        is_greedy=all(logprob.is_argmax for logprob in scored),
        is_truncated=False,
    )


def rescore(samples: Iterable[SampleRecord], scorer: str) -> list[SampleRecord]:
    """The same samples with `scorer` worked out again from their texts; other scorers' results stay."""
    samples = list(samples)
    judged = {name for sample in samples for name in sample.score if name not in SCORER_NAMES}
    if judged:  # by a judge of the whole run, which leaves nothing to work out again
        if scorer not in judged:
            raise UserError(f"eval.scorer: unknown scorer {scorer!r} of this run: {near_name(scorer, judged)}")
        return samples
    if scorer not in SCORER_NAMES:
        raise UserError(f"eval.scorer: unknown scorer {scorer!r}: {near_name(scorer, SCORER_NAMES)}")
    check_scorer(scorer, scorers_for(has_choices=any(sample.choices for sample in samples)))
    if all(sample.reference is None for sample in samples):
        raise UserError(f"eval.scorer: no sample has a reference answer for {scorer} to compare with")
    return [_scored(sample, (scorer,), sample.output_text) for sample in samples]


def check_scorer(scorer: str | None, known: Iterable[str]) -> None:
    """UserError for one that cannot judge these samples."""
    known = tuple(known)
    if scorer is not None and scorer not in known:
        raise UserError(f"eval.scorer: {scorer} does not judge such answers; say one of {', '.join(known)}")


def _request(task: Task, sample: Sample, sampling: SamplingConfig, *, repeat: int, request_id: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        sample_id=sample.sample_id,
        sampling=_params(task, sample, sampling, repeat),
        prompt=sample.prompt,
        messages=sample.messages,
        prompt_token_ids=sample.prompt_token_ids,
        turn=sample.turn,
        repeat=repeat,
        category=sample.category,
        audio=sample.audio,
        follows=_request_id(sample, sample.turn - 1, repeat) if sample.turn else None,
    )


def _request_id(sample: Sample, turn: int, repeat: int) -> str:
    return f"{sample.sample_id}-t{turn}-r{repeat}"


def _params(task: Task, sample: Sample, sampling: SamplingConfig, repeat: int) -> SamplingParams:
    """The run's parameters for one request; `resolve` has put numbers in place of what was unset."""
    assert sampling.temperature is not None and sampling.top_k is not None and sampling.top_p is not None
    assert sampling.min_p is not None and sampling.repetition_penalty is not None
    return SamplingParams(
        max_output_tokens=sample.max_output_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bad_words=sampling.bad_words,
        min_tokens=sampling.min_tokens,
        seed=sampling.seed + repeat,
        stop=task.stop if sample.stop is None else sample.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        prompt_logprobs=None if sample.scored_from is None else 0,
    )


def _scored(sample: SampleRecord, scorers: Iterable[str], text: str) -> SampleRecord:
    """`sample` with what each scorer makes of `text`, and whatever other scorers made before."""
    extracted, score = dict(sample.extracted), dict(sample.score)
    for name in scorers:
        extracted[name], score[name] = score_text(name, text, sample.reference, sample.choices)
    return dataclasses.replace(sample, extracted=extracted, score=score)
