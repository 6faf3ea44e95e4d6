"""Whether prompts fit the context, token by token.

Belongs here: refusals, and notices of what will fail or be cut. Does not belong here: what is asked (evals/).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.errors import UserError
from specbench.generate import GenerateRequest
from specbench.run_config import RunConfig

if TYPE_CHECKING:
    from specbench.engine.tokenizer import Tokenizer

#: Requests that a notice names.
_NUM_NAMED = 3


def require_tokenizer(config: RunConfig, checkpoint: Path) -> Tokenizer:
    from specbench.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(checkpoint, config.model.tokenizer, config.model.chat_template)
    if tokenizer is None:
        raise UserError(f"model.tokenizer: {checkpoint} has none, and eval={config.eval.name} counts tokens; give one")
    return tokenizer


def check_prompts(
    config: RunConfig, checkpoint: Path, vocab_size: int, requests: Iterable[GenerateRequest]
) -> list[str]:
    """UserError for a prompt that leaves no room; notices of audio that does not, and of answers that may be cut."""
    from specbench.engine.content.audio_files import MAX_TOKENS, num_audio_tokens
    from specbench.engine.tokenizer import encode_prompt, load_tokenizer

    tokenizer = load_tokenizer(checkpoint, config.model.tokenizer, config.model.chat_template)
    max_model_len = config.model.max_model_len
    assert max_model_len is not None
    advice = ", lower eval.num_fewshot" if config.eval.num_fewshot else ""
    misfits: dict[str, list[str]] = {"clip": [], "context": [], "answer": []}
    #: Request -> tokens of its prompt, of a turn behind another one without the answers, and the answers' most.
    lengths: dict[str, tuple[int, int]] = {}
    for request in requests:
        if request.repeat:
            continue
        token_ids = encode_prompt(tokenizer, request).token_ids
        before, answers = (0, 0) if request.follows is None else lengths[request.follows]
        num_tokens = len(token_ids) + before
        clips = [num_audio_tokens(source) or 0 for source in request.audio]
        lengths[request.request_id] = (num_tokens + sum(clips), answers + request.sampling.max_output_tokens)
        if not token_ids:
            raise UserError(
                f"eval.data: the prompt of {request.sample_id} has no tokens; correct it, or model.chat_template"
            )
        if not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            raise UserError(
                f"eval.data: prompt_token_ids of {request.sample_id}: ids must lie in 0 .. {vocab_size - 1}, the "
                "checkpoint's vocabulary; correct them"
            )
        if num_tokens >= max_model_len:
            raise UserError(
                f"eval.data: the prompt of {request.sample_id} has {num_tokens} tokens and leaves no room in a context "
                f"of {max_model_len}; shorten it{advice} or raise model.max_model_len"
            )
        if max(clips, default=0) > MAX_TOKENS:
            misfits["clip"].append(request.sample_id)
        elif num_tokens + sum(clips) >= max_model_len:
            misfits["context"].append(request.sample_id)
        elif sum(lengths[request.request_id]) > max_model_len:
            misfits["answer"].append(request.sample_id)
    return _misfit_notices(misfits, max_model_len)


def _misfit_notices(misfits: Mapping[str, Sequence[str]], max_model_len: int) -> list[str]:
    """One for each kind that has any: requests that are too long fail one by one, and the others run."""
    from specbench.engine.content.audio_files import MAX_TOKENS

    context = f"a context of {max_model_len} tokens"
    texts = {
        "clip": f"a clip of over {MAX_TOKENS:,} tokens (10 minutes) and will fail: cut it",
        "context": f"a prompt whose audio leaves no room in {context} and will fail: raise model.max_model_len",
        "answer": f"less room than max_output_tokens in {context}",
    }
    return [
        f"{len(ids)} request{' has' if len(ids) == 1 else 's have'} {texts[kind]} ({_first_of(ids)})."
        for kind, ids in misfits.items()
        if ids
    ]


def _first_of(ids: Sequence[str]) -> str:
    more = len(ids) - _NUM_NAMED
    return ", ".join(ids[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
