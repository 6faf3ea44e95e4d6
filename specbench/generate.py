"""The Generate protocol: what evals and benchmark.py ask of a target, embedded engine or server alike.

Belongs here: requests in, results out, and the contract between them. Does not belong here: how any target works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specbench.records import EngineStep, RequestRecord, VerifyStep

Message = dict[str, str]
#: A wav, flac, mp3 or ogg file, or its content.
AudioSource = Path | bytes


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and where they end.

    Applied in this order: what may come at all (logit_bias, allowed_token_ids, min_tokens), penalties, bad words,
    temperature, min_p, top_k, top_p. A greedy request takes the argmax of what the first three leave.
    """

    max_output_tokens: int
    #: 0 is greedy, as is anything below 1e-5.
    temperature: float = 0.0
    #: 0 is off. Ids as likely as the last one kept are kept too; for top_p alike.
    top_k: int = 0
    #: 1 is off.
    top_p: float = 1.0
    #: Drop ids less likely than this share of the most likely one's probability; 0 is off.
    min_p: float = 0.0
    #: Divides logits above 0, and multiplies those below, of ids in the prompt or the output; 1 is off.
    repetition_penalty: float = 1.0
    #: Taken off the logits of ids in the output, once; 0 is off.
    presence_penalty: float = 0.0
    #: Taken off the logits of ids in the output, for each time; 0 is off.
    frequency_penalty: float = 0.0
    #: (id, what is added to its logit).
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: Nothing else is generated; empty: everything may be.
    allowed_token_ids: tuple[int, ...] = ()
    #: Texts that are not generated, as the tokenizer writes them with and without a space before.
    bad_words: tuple[str, ...] = ()
    #: The same as token ids. A sequence that begins in the prompt is not generated text and may be completed.
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    #: Output tokens before which nothing ends the request: stop ids are not generated, stop strings don't count.
    min_tokens: int = 0
    seed: int = 0
    #: Cut text, tokens and counts at the first of these.
    stop: tuple[str, ...] = ()
    #: In addition to the checkpoint's own end-of-sequence ids.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    #: Log-probabilities of each output token and of this many most likely ids; None is off.
    logprobs: int | None = None
    #: The same of the prompt's tokens, always before any parameter is applied.
    prompt_logprobs: int | None = None
    #: Whether logprobs are those of the law that the token was drawn from, rather than the model's own.
    processed_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """What the model made of one token, given those before it."""

    token_id: int
    #: Natural logarithm of its probability.
    logprob: float
    #: 1 and one for each id that is more likely.
    rank: int
    #: Whether greedy decoding takes it: of equally likely ids the lowest.
    is_argmax: bool
    #: (id, logprob) of the most likely ids, as many as were asked for, the likeliest first.
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt: exactly one of `prompt`, `messages` and `prompt_token_ids` is set.

    Clips of `audio` go in order to the audio markers of `prompt` or `prompt_token_ids`; in a chat they are heard before
    the text of the first user message.
    """

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
    audio: tuple[AudioSource, ...] = ()
    #: A turn behind another one: the id of that one's request. It is submitted when that ends, `messages` behind the
    #: messages of that and the answer that came.
    follows: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A finished request: its record, its verify steps and its text. A failed one has `record.error` set."""

    record: RequestRecord
    verify_steps: Sequence[VerifyStep]
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    #: The answer channel, without stop token and stop string.
    output_text: str
    #: The reasoning channel, where the chat format has one.
    reasoning_text: str = ""
    #: The rendered prompt; None when the request was given as token ids and no tokenizer is there.
    prompt_text: str | None = None
    #: One for each output token; None where they were not asked for.
    logprobs: list[TokenLogprob] | None = None
    #: One for each prompt token; the first has nothing before it and is None. None where they were not asked for.
    prompt_logprobs: list[TokenLogprob | None] | None = None
    #: What was asked for. None: nothing but greedy decoding.
    sampling: SamplingParams | None = None
    #: Clips that the prompt's placeholders stand for.
    audio: tuple[AudioSource, ...] = ()


class Load(Protocol):
    """When requests arrive. Implementations are in arrivals.py, what keeps to it is submission.Client."""

    @property
    def concurrency(self) -> int | None:
        """Requests that are out at once, at most; None: no limit."""
        ...

    def scheduled_s(self, index: int) -> float | None:
        """When the request falls due, in seconds after the load began; None: as soon as a place is free. `index` counts
        the requests that follow no other."""
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

    def reset_prefix_cache(self) -> None:
        """What ran so far no longer speeds up what comes."""
        ...

    def memory_budget(self) -> dict[str, Any]:
        """What run.json keeps of the target's memory; empty where it can't be known."""
        ...
