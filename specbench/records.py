"""What a run leaves behind: the record types, their columns and the schema version.

Belongs here: the shape and the units of every recorded value. Does not belong here: how a value is measured (the
engine), stored (run_directory.py) or turned into a metric (reports/). This file imports nothing of specbench.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SCHEMA_VERSION = 1
#: report.baseline of a run that took turns with one without speculation, and the folder of that one in its directory.
INTERLEAVED, BASELINE_FOLDER = "none", "baseline"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request. Times are seconds since the run's start; `None` means that it never happened."""

    request_id: str
    sample_id: str
    turn: int
    repeat: int
    is_warmup: bool
    category: str | None
    num_prompt_tokens: int
    #: Of these, found in the prefix cache at the first admission; None when it was off, or not asked.
    num_cached_prompt_tokens: int | None
    #: Kept tokens; a stop token counts here, though it is not in the text.
    num_output_tokens: int
    #: "stop", "length", "error" or "aborted".
    finish_reason: str
    #: Submission, after any wait in the client.
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    num_preemptions: int
    error: str | None
    #: When the load's timetable had it; None where there is none, and for a turn behind another one.
    scheduled_s: float | None = None
    #: Seconds of arrival_s - scheduled_s that it waited in the client for a place among load.concurrency; what is left
    #: is the client's lag.
    client_queue_s: float | None = None


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """One decode step of one request, drafted or not. The first token of a request is not such a step."""

    request_id: str
    #: 0-based within the request.
    step: int
    engine_step: int
    #: Index, among the request's output tokens, of the first token that this step emitted.
    output_index: int
    #: Draft ids >= 0 that were verified.
    num_drafted: int
    #: As verified, before any stop.
    num_accepted: int
    #: Kept tokens, the bonus token included.
    num_emitted: int
    #: num_accepted + 1 - num_emitted: verified tokens behind a stop.
    num_discarded: int
    is_trimmed: bool
    #: Requests in the engine step.
    batch_size: int
    end_s: float


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step of the engine over its whole batch. Durations are seconds of host time unless events measured them."""

    engine_step: int
    start_s: float
    end_s: float
    num_prefill_tokens: int
    num_decode_requests: int
    num_tokens: int
    schedule_s: float
    target_s: float | None
    verify_s: float | None
    draft_s: float | None
    #: Blocks that requests held, over all cache groups.
    kv_blocks_used: int
    num_preempted: int
    #: Blocks of the prefix cache that were given to other tokens.
    num_evicted_blocks: int
    #: On a GPU: from the end of the step before to this one's first work there.
    idle_s: float | None = None


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One turn of one sample: what was asked, what came out, what it scored under each scorer."""

    sample_id: str
    turn: int
    repeat: int
    #: The rendered prompt; None when the sample is given as token ids and there is no tokenizer.
    prompt: str | None
    prompt_token_ids: Sequence[int] | None
    output_text: str
    #: The reasoning channel, where the chat format has one; "" otherwise. Never scored.
    reasoning_text: str
    #: A list, or an array("i") once it has been on disk: there are tens of millions of ids in a large run.
    output_token_ids: Sequence[int]
    reference: str | None
    #: Scorer name -> extracted answer; None where nothing could be extracted (an invalid answer).
    extracted: dict[str, str | None]
    #: Scorer name -> score in [0, 1]; None where the sample has no reference.
    score: dict[str, float | None]
    is_truncated: bool
    category: str | None = None
    #: What there was to choose from; empty for an open question.
    choices: list[str] = field(default_factory=list)
    #: Dimension -> value, by which accuracy is given too; empty: by category alone.
    groups: dict[str, str] = field(default_factory=dict)
    #: Natural logarithm of the probability of the prompt's last part, where an eval asks for it; None elsewhere.
    loglikelihood: float | None = None
    #: Whether greedy decoding says that part.
    is_greedy: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which checkpoint was asked for and which one ran."""

    requested: str
    ran: str
    path: str | None
    revision: str | None
    #: Over the sorted names and bytes of config.json and the weight files.
    sha256: str | None
    packaged: bool
    num_parameters: int | None = None
    num_modules: int = 0


@dataclass(frozen=True, slots=True)
class DataIdentity:
    """Which samples ran."""

    name: str
    path: str | None
    revision: str | None
    sha256: str | None
    packaged: bool
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """Replay of emitted tokens without speculation, compared token by token. Counts are of requests."""

    #: "identical", "near_ties", "mismatch", "not_checked" or "not_applicable".
    status: str
    compared: int = 0
    identical: int = 0
    near_ties: int = 0
    mismatches: int = 0
    #: Largest logit difference seen between verify rows and single rows on the same prefix.
    max_logit_difference: float | None = None
    #: Top logit minus the emitted token's logit at the worst differing token.
    largest_margin: float | None = None
    #: How large a margin may be to be a near tie: twice the difference above, as far as rounding explains it.
    allowed_margin: float | None = None
    #: The first few differing tokens, for the report: request_id, output_index, emitted, expected, margin.
    differences: list[dict] = field(default_factory=list)
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class LosslessnessCell:
    """One test of one way to speculate against plain decoding."""

    proposer: str
    num_speculative_tokens: int
    #: How drafts were verified: "argmax", "sample and match", "standard" or "block".
    acceptance: str
    #: "greedy", or the temperature and what else shapes the law.
    sampling: str
    test: str
    #: "identical", "near_ties" or "mismatch" of texts; "consistent" or "mismatch" of laws; "not_checked".
    status: str
    #: Requests, or draws of both sides together.
    compared: int
    #: Requests, of texts compared token for token.
    identical: int | None = None
    near_ties: int | None = None
    mismatches: int | None = None
    statistic: float | None = None
    p_value: float | None = None
    #: The smallest departure that would have been seen with a probability of 90 %, and what it is measured in.
    detectable: float | None = None
    detectable_unit: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class LosslessnessCheck:
    """The same requests with and without speculation."""

    #: The worst status of a cell; "not_applicable" where accepted drafts are not verified.
    status: str
    cells: list[LosslessnessCell] = field(default_factory=list)
    #: The first difference of a few requests: request_id, output_index, speculative, plain (token ids), margin (of the
    #: likeliest token over the emitted one), allowed (what rounding can turn), is_near_tie.
    differences: list[dict] = field(default_factory=list)
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One row of the table of an eval that computes its own: a task or group, filter and metric."""

    task: str
    version: str
    filter: str
    num_fewshot: int | None
    metric: str
    #: In the metric's own unit; None where it is no finite number.
    value: float | None
    #: Standard error of a mean; None for what is none.
    stderr: float | None
    #: Documents.
    num_samples: int | None
    higher_is_better: bool | None
    repeat: int


@dataclass(slots=True)
class RunRecord:
    """The envelope of a run: run.json. Written at the start, rewritten at the end."""

    #: "running", "finished" or "failed".
    status: str
    #: Resolved configuration as plain containers.
    config: dict
    command: str
    version: str
    commit: str | None
    is_dirty: bool | None
    hardware: dict
    packages: dict[str, str]
    model: ModelIdentity
    data: DataIdentity
    #: "engine" when every verify step was seen by the embedded engine; a server target names its source.
    acceptance_source: str
    #: ISO 8601, UTC.
    started_at: str
    finished_at: str | None = None
    #: 1, and one more for each time that the run was resumed: duration and throughput are those of one segment alone.
    num_segments: int = 1
    error: str | None = None
    output_check: OutputCheck | None = None
    losslessness: LosslessnessCheck | None = None
    #: What an eval that judges the whole run computed itself; empty elsewhere.
    task_results: list[TaskResult] = field(default_factory=list)
    #: The checkpoint that drafts, where that is one of its own.
    draft_model: ModelIdentity | None = None
    #: Notices that the reader of any figure must see: fallbacks, packaged data, skipped checks.
    notices: list[str] = field(default_factory=list)
    #: The engine's memory budget: bytes a line, KV bytes a token, blocks of each cache group. Empty for a server.
    memory: dict = field(default_factory=dict)
    #: Figures under the keys of metrics.json that whatever `acceptance_source` names gave in sum, and that stand in
    #: place of what the event log would give; empty for a run whose log has everything.
    reported_metrics: dict = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
