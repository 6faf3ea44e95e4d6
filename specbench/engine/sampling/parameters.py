"""Sampling parameters of one request, checked, with what its prompt, tokenizer and checkpoint add.

Belongs here: what may be asked for. Does not belong here: tensors (sampling_state.py), what a parameter does to logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specbench.errors import UserError
from specbench.generate import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """What the device learns of a request's sampling on (re)admission: no state of its own, so that a resumed request
    goes on as if it had never been away."""

    params: SamplingParams
    #: The random stream's 64-bit key.
    key: int
    num_prompt_tokens: int
    #: Ids that end the request.
    stop_token_ids: tuple[int, ...]
    #: Token sequences that are not generated.
    bad_words: tuple[tuple[int, ...], ...]


def stop_ids(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that end the request."""
    return tuple(dict.fromkeys((*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids))))


def bad_word_sequences(
    sampling: SamplingParams, encode: Callable[[str], list[int]] | None
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the bad words. A text is taken as it stands at the start of a text and, with a space before,
    inside one; without a tokenizer there must be none."""
    if encode is None:
        assert not sampling.bad_words
        return sampling.bad_word_token_ids
    texts = [text for word in sampling.bad_words for text in (word.lstrip(), " " + word.lstrip())]
    encoded = [tuple(encode(text)) for text in texts]
    return tuple(dict.fromkeys((*sampling.bad_word_token_ids, *(ids for ids in encoded if ids))))


def check_parameters(where: str, sampling: SamplingParams, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
    """UserError for a value out of range, an id that is none, or parameters that leave nothing to generate. `where`
    goes before the parameter's name."""
    try:
        _check_ranges(sampling, vocab_size)
        _check_ids(sampling, vocab_size)
        _check_something_is_left(sampling, stop_ids(sampling, eos_token_ids))
    except UserError as error:
        raise UserError(f"{where}{error}") from None


def _check_ranges(sampling: SamplingParams, vocab_size: int) -> None:
    temperature, biases = sampling.temperature, [bias for _, bias in sampling.logit_bias]
    factor, presence, frequency = (
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
    for name, value, is_good, range_text in (
        # Within these, what all of them together make of a logit stays finite in fp32.
        ("temperature", temperature, temperature == 0 or 1e-20 <= temperature <= 1e20, "0 or from 1e-20 to 1e+20"),
        ("repetition_penalty", factor, 1e-6 <= factor <= 1e6, "from 1e-06 to 1e+06"),
        ("presence_penalty", presence, -1e6 <= presence <= 1e6, "from -1e+06 to 1e+06"),
        ("frequency_penalty", frequency, -1e6 <= frequency <= 1e6, "from -1e+06 to 1e+06"),
        ("logit_bias", biases, all(-1e9 <= bias <= 1e9 for bias in biases), "from -1e+09 to 1e+09"),
        ("top_k", sampling.top_k, 0 <= sampling.top_k < 2**31, "from 0 to 2147483647"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "from 0 to 1"),
        (
            "min_tokens",
            sampling.min_tokens,
            0 <= sampling.min_tokens <= sampling.max_output_tokens,
            f"from 0 to max_output_tokens={sampling.max_output_tokens}",
        ),
        *(
            (name, value, value is None or 0 <= value <= vocab_size, f"from 0 to {vocab_size}, the vocabulary")
            for name, value in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs))
        ),
    ):
        if not is_good:
            raise UserError(f"{name}: must be {range_text}, not {value}")


def _check_ids(sampling: SamplingParams, vocab_size: int) -> None:
    if any(not word for word in (*sampling.bad_words, *sampling.bad_word_token_ids)):
        raise UserError("bad_words: an empty one would ban everything; leave it out")
    if any(not stop for stop in sampling.stop):
        raise UserError("stop: an empty one would end every answer at once; leave it out")
    for name, ids in (
        ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("bad_word_token_ids", [token_id for word in sampling.bad_word_token_ids for token_id in word]),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise UserError(f"{name}: {token_id} is no id of the vocabulary, 0 .. {vocab_size - 1}")


def _check_something_is_left(sampling: SamplingParams, stop_token_ids: tuple[int, ...]) -> None:
    allowed = set(sampling.allowed_token_ids)
    if allowed and sampling.min_tokens and allowed <= set(stop_token_ids):
        raise UserError("min_tokens: every id of allowed_token_ids ends the request; allow another, or drop min_tokens")
