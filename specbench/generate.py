"""The Generate protocol: what evals and benchmark.py ask of a target, embedded engine or server alike.

Belongs here: requests in, results out, and the contract between them. Does not belong here: how any target works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from specbench.records import EngineStep, RequestRecord, VerifyStep

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and where they end."""

    max_output_tokens: int
    #: 0 is greedy.
    temperature: float = 0.0
    #: 0 is off.
    top_k: int = 0
    #: 1 is off.
    top_p: float = 1.0
    seed: int = 0
    #: Cut text, tokens and counts at the first of these.
    stop: tuple[str, ...] = ()
    #: In addition to the checkpoint's own end-of-sequence ids.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt: exactly one of `prompt`, `messages` and `prompt_token_ids` is set."""

    request_id: str
    sample_id: str
    sampling: SamplingParams
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    turn: int = 0
    repeat: int = 0
    is_warmup: bool = False
    category: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A finished request: its record, its verify steps and its text. A failed one has `record.error` set."""

    record: RequestRecord
    verify_steps: list[VerifyStep]
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    #: The answer channel, without stop token and stop string.
    output_text: str
    #: The reasoning channel, where the chat format has one.
    reasoning_text: str = ""
    #: The rendered prompt; None when the request was given as token ids and no tokenizer is there.
    prompt_text: str | None = None


class Load(Protocol):
    """When requests arrive. Implementations are in load.py."""

    def num_due(self, now_s: float, num_submitted: int, num_in_flight: int) -> int:
        """How many further requests to submit at `now_s` seconds after the load began."""
        ...

    def next_due_s(self, now_s: float, num_submitted: int) -> float | None:
        """When the next request falls due by the clock alone; None if only a finished request can free a place."""
        ...


@dataclass(slots=True)
class GenerateListener:
    """Callbacks of a running `generate`; each is called on the caller's thread."""

    #: Called for each finished request, in order of finishing.
    on_finished: Callable[[GenerateResult], None]
    #: Called after each engine step (never by a server target).
    on_engine_step: Callable[[EngineStep], None] = field(default=lambda step: None)


class Target(Protocol):
    """What can run requests: the embedded engine, or a server."""

    def generate(self, requests: Iterable[GenerateRequest], load: Load, listener: GenerateListener) -> None:
        """Run all requests, submitting them as `load` says. A request that fails is a result, not an exception."""
        ...
