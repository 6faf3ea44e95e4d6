"""A target that answers at once, in place of the embedded engine: for tests of what happens around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from specbench.engine.config import EngineConfig
from specbench.generate import GenerateListener, GenerateRequest, GenerateResult, Load
from specbench.machinery import Machinery
from specbench.records import EngineStep, OutputCheck, RequestRecord, VerifyStep
from specbench.submission import Client, Submission

NUM_STEPS = 3


class FakeEngine:
    """Each request: a first token, then verify steps, each with half of its drafts accepted. With the most drafts that
    an engine of the script was started with there are NUM_STEPS; with fewer, as many as the same text takes."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float], script: Script) -> None:
        self._k = config.num_speculative_tokens
        self._clock = clock
        self._script = script
        self._num_steps = 0

    def generate(self, requests: Iterable[GenerateRequest], load: Load, listener: GenerateListener) -> None:
        with Client(requests, load, self._clock) as client:
            while not client.is_done:
                for submission in client.take():
                    self._answer(submission, client, listener)

    def _answer(self, submission: Submission, client: Client, listener: GenerateListener) -> None:
        request = submission.request
        if not request.is_warmup:
            if self._script.num_left == 0:
                raise self._script.ending
            self._script.num_left -= 1
        self._script.seen.append(request.request_id)
        self._script.asked.append(request)
        listener.on_engine_step(self._step())
        listener.on_finished(client.finished(self._result(request, submission.error)))

    def reset_prefix_cache(self) -> None:
        self._script.seen_at_reset.append(len(self._script.seen))

    def memory_budget(self) -> dict:
        return {"total_bytes": 1}

    def _step(self) -> EngineStep:
        now = self._clock()
        self._num_steps += 1
        return EngineStep(self._num_steps - 1, now, now, 1, 0, 1, 0.0, None, None, None, 1, 0, 0)

    def _result(self, request: GenerateRequest, error: str | None) -> GenerateResult:
        now = self._clock()
        if error is not None or request.request_id in self._script.failing:
            record = self._record(request, 0, "error", now, error or "made to fail")
            return GenerateResult(record, [], [1], [], "")
        accepted = self._k // 2
        num_emitted = NUM_STEPS * (max(engine.num_speculative_tokens for engine in self._script.started) // 2 + 1)
        steps = [
            VerifyStep(
                request_id=request.request_id,
                step=step,
                engine_step=self._num_steps - 1,
                output_index=1 + step * (accepted + 1),
                num_drafted=self._k,
                num_accepted=accepted,
                num_emitted=accepted + 1,
                num_discarded=0,
                is_trimmed=False,
                batch_size=1,
                end_s=now,
            )
            for step in range(num_emitted // (accepted + 1))
        ]
        tokens = [self._script.tokens_by_k.get(self._k, 5)] * (1 + num_emitted)
        return GenerateResult(
            self._record(request, len(tokens), "stop", now, None), steps, [1, 2], tokens, "#### 7", "", "a prompt"
        )

    def _record(
        self, request: GenerateRequest, num_tokens: int, reason: str, now: float, error: str | None
    ) -> RequestRecord:
        return RequestRecord(
            request_id=request.request_id,
            sample_id=request.sample_id,
            turn=request.turn,
            repeat=request.repeat,
            is_warmup=request.is_warmup,
            category=request.category,
            num_prompt_tokens=2,
            num_cached_prompt_tokens=0,
            num_output_tokens=num_tokens,
            finish_reason=reason,
            arrival_s=now,
            first_scheduled_s=None if error else now,
            first_token_s=None if error else now,
            last_token_s=None if error else now + 1e-3,
            num_preemptions=0,
            error=error,
        )


class Script:
    """What a run's engines do, and what they saw."""

    def __init__(self) -> None:
        #: Measured requests that are answered before `ending` is raised; below zero: all.
        self.num_left = -1
        self.ending: BaseException = KeyboardInterrupt()
        self.failing: set[str] = set()
        #: Ids in the order of their answers.
        self.seen: list[str] = []
        #: The requests themselves.
        self.asked: list[GenerateRequest] = []
        #: How many had been answered when a prefix cache was emptied.
        self.seen_at_reset: list[int] = []
        #: k -> the token that an engine of k drafts says; 5 unless it is here.
        self.tokens_by_k: dict[int, int] = {}
        #: Settings of each engine that was started.
        self.started: list[EngineConfig] = []

    def machinery(self) -> Machinery:
        return Machinery(self._start, lambda engine, results, limit: OutputCheck("identical", min(len(results), limit)))

    def _start(
        self, config: EngineConfig, clock: Callable[[], float], on_progress: Callable[[str], None]
    ) -> FakeEngine:
        self.started.append(config)
        return FakeEngine(config, clock, self)
