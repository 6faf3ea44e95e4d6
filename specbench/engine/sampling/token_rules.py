"""What may come at all: logit bias, allowed ids, no stop before min_tokens, bad words.

Rules are sets of ids of any size, so they are applied request by request, for the few that have any.

Does not belong here: penalties (penalties.py), filters (filters.py), checks of what users ask for (parameters.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specbench.engine.layers.to_device import to_device
from specbench.engine.sampling.parameters import RequestSampling

_BANNED = float("-inf")
#: Stands in a bad word's prefix for the tokens before it, and equals every token.
_ANY = -2


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences by their last ids and what must stand before."""

    # [num_words, longest - 1] int64: the tokens before the last, right-aligned, _ANY in front
    prefix_ids: torch.Tensor
    # [num_words] int64
    last_ids: torch.Tensor
    # [num_words] int64: tokens before the last
    num_prefix: torch.Tensor

    @classmethod
    def of(cls, words: tuple[tuple[int, ...], ...], device: torch.device) -> BadWords:
        longest = max(len(word) for word in words)
        prefixes = [[_ANY] * (longest - len(word)) + list(word[:-1]) for word in words]
        prefix_ids, last_ids, num_prefix = to_device(
            [
                np.asarray(prefixes, dtype=np.int64).reshape(len(words), longest - 1),
                np.asarray([word[-1] for word in words]),
                np.asarray([len(word) - 1 for word in words]),
            ],
            device,
        )
        return cls(prefix_ids=prefix_ids, last_ids=last_ids, num_prefix=num_prefix)

    def apply_(
        self, logits: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, num_prompt_tokens: int
    ) -> None:
        """Ban the last id of every word whose other ids are the newest output; as for `TokenRules.apply_`.

        Where that would leave nothing to generate it does nothing.
        """
        width = self.prefix_ids.shape[1]
        # [num_rows, width]: columns of the tokens right before each row's
        before = positions[:, None] + torch.arange(-width, 0, device=positions.device)
        newest = token_ids[before.clamp_min(0)]
        is_same = (newest[:, None] == self.prefix_ids) | (self.prefix_ids == _ANY)
        is_output = positions[:, None] - self.num_prefix >= num_prompt_tokens
        is_complete = is_same.all(dim=-1) & is_output
        bans = torch.zeros_like(logits).index_add_(1, self.last_ids, is_complete.to(logits.dtype)) > 0
        is_all = ((logits == _BANNED) | bans).all(dim=-1)
        logits.masked_fill_(bans & ~is_all[:, None], _BANNED)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """One request's rules, on the device."""

    # [num_biased] int64 and fp32
    bias_ids: torch.Tensor | None
    bias: torch.Tensor | None
    # [num_others] int64: ids that are not allowed
    banned_ids: torch.Tensor | None
    # [num_stops] int64: ids that may not come among the first min_tokens
    stop_ids: torch.Tensor | None
    min_tokens: int
    num_prompt_tokens: int
    bad_words: BadWords | None

    @classmethod
    def of(cls, sampling: RequestSampling, vocab_size: int, device: torch.device) -> TokenRules | None:
        """None where the request has none."""
        params = sampling.params
        known = range(vocab_size)
        # What the vocabulary lacks, such as ids of a larger tokenizer, cannot come anyway.
        stop_ids = [one for one in sampling.stop_token_ids if one in known] if params.min_tokens > 0 else []
        bad_words = tuple(word for word in sampling.bad_words if all(one in known for one in word))
        if not (params.logit_bias or params.allowed_token_ids or stop_ids or bad_words):
            return None
        bias_ids, bias = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
        return cls(
            bias_ids=_ids(bias_ids, device),
            bias=_floats(bias, device) if bias else None,
            banned_ids=_all_but(params.allowed_token_ids, vocab_size, device) if params.allowed_token_ids else None,
            stop_ids=_ids(stop_ids, device),
            min_tokens=params.min_tokens,
            num_prompt_tokens=sampling.num_prompt_tokens,
            bad_words=BadWords.of(bad_words, device) if bad_words else None,
        )

    def apply_(self, logits: torch.Tensor, positions: torch.Tensor) -> None:
        """Bias, allowed ids and min_tokens, in place on fp32 logits [num_rows, vocab] of this request.

        positions: [num_rows] int64, of the tokens to be sampled.
        """
        if self.bias_ids is not None and self.bias is not None:
            logits.index_add_(1, self.bias_ids, self.bias.expand(len(logits), -1))
        if self.banned_ids is not None:
            logits.index_fill_(1, self.banned_ids, _BANNED)
        if self.stop_ids is not None:
            is_early = positions - self.num_prompt_tokens < self.min_tokens
            stops = logits[:, self.stop_ids].masked_fill_(is_early[:, None], _BANNED)
            logits.index_copy_(1, self.stop_ids, stops)

    def ban_words_(self, logits: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Bad words, behind the penalties. token_ids: [width] int64, the request's row of the token pool."""
        if self.bad_words is not None:
            self.bad_words.apply_(logits, token_ids, positions, self.num_prompt_tokens)


def _all_but(token_ids: tuple[int, ...], vocab_size: int, device: torch.device) -> torch.Tensor:
    is_banned = torch.ones(vocab_size, dtype=torch.bool)
    is_banned[list(token_ids)] = False
    return to_device([is_banned.numpy().nonzero()[0]], device)[0]


def _ids(values: tuple[int, ...] | list[int], device: torch.device) -> torch.Tensor | None:
    return to_device([np.asarray(values)], device)[0] if values else None


def _floats(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    (bits,) = to_device([np.asarray(values, dtype=np.float64).view(np.int64)], device)
    return bits.view(torch.float64).float()
