"""Sampling parameters on the device: one persistent row a request, as everything that outlives a step.

Belongs here: parameters, and which passes a batch needs. Does not belong here: what is generated so far (the token pool
of execution/request_state.py holds it), what a pass does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from specbench.engine.layers import fusion
from specbench.engine.layers.to_device import to_device
from specbench.engine.sampling.parameters import RequestSampling
from specbench.engine.sampling.penalties import PenaltyRows
from specbench.engine.sampling.sampler import RuledRows, SamplingRows
from specbench.engine.sampling.token_rules import TokenRules
from specbench.generate import SamplingParams

#: Below it logits over temperature leave the range of fp32, and the draw is the argmax anyway.
MIN_TEMPERATURE = 1e-5

#: What a request asks for, as bits.
_TEMPERATURE, _FILTERS, _TEXT, _LOGPROBS, _PROMPT_LOGPROBS = (1 << bit for bit in range(5))


class SamplingState:
    """Rows of running requests. `add` fills one; `rows` gathers those of a batch."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size
        self.device = device
        # [num_rows] each: views of two tensors, which are filled in one go
        self._whole = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        self.key, self.top_k, self.num_prompt_tokens = self._whole.unbind(0)
        self._real = torch.zeros(6, num_rows, dtype=torch.float32, device=device)
        self.temperature, self.min_p, self.top_p, self.repetition, self.presence, self.frequency = self._real.unbind(0)
        self.top_p.fill_(1.0)
        self.repetition.fill_(1.0)
        # [num_rows] each, on the host: what a batch needs
        self._asked_np = np.zeros(num_rows, dtype=np.int64)
        self.has_min_p_np = np.zeros(num_rows, dtype=bool)
        self.top_k_np = np.zeros(num_rows, dtype=np.int64)
        self.has_top_p_np = np.zeros(num_rows, dtype=bool)
        self.has_repetition_np = np.zeros(num_rows, dtype=bool)
        self.has_penalties_np = np.zeros(num_rows, dtype=bool)
        self.has_rules_np = np.zeros(num_rows, dtype=bool)
        self._rules: list[TokenRules | None] = [None] * num_rows
        # [num_rows] each, on the host: likeliest ids beside the log-probability of a token; -1: not asked for
        self.num_logprobs_np = np.full(num_rows, -1)
        self.num_prompt_logprobs_np = np.full(num_rows, -1)
        self.has_processed_logprobs_np = np.zeros(num_rows, dtype=bool)
        self.num_prompt_tokens_np = np.zeros(num_rows, dtype=np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters' tensors; rules of single requests come and go beside them."""
        return self._whole.nbytes + self._real.nbytes

    def add(self, rows: Sequence[int], samplings: Sequence[RequestSampling]) -> None:
        """Take over requests' parameters. Where decoding is greedy the filters would change nothing and are off."""
        for row, sampling in zip(rows, samplings, strict=True):
            self._add_on_host(row, sampling)
        top_k = self.top_k_np[list(rows)].tolist()
        whole = [(one.key, k, one.num_prompt_tokens) for one, k in zip(samplings, top_k, strict=True)]
        real = np.asarray([_real_parameters(sampling.params) for sampling in samplings], dtype=np.float64)
        on_device, whole_values, real_bits = to_device(
            [np.asarray(rows), np.asarray(whole, dtype=np.int64).T, real.T.copy().view(np.int64)], self.device
        )
        self._whole.index_copy_(1, on_device, whole_values)
        self._real.index_copy_(1, on_device, real_bits.view(torch.float64).float())

    def _add_on_host(self, row: int, sampling: RequestSampling) -> None:
        params = sampling.params
        is_sampled = params.temperature >= MIN_TEMPERATURE
        self._rules[row] = TokenRules.of(sampling, self.vocab_size, self.device)
        self.has_min_p_np[row] = is_sampled and params.min_p > 0
        self.top_k_np[row] = params.top_k if is_sampled else 0
        self.has_top_p_np[row] = is_sampled and params.top_p < 1
        self.has_repetition_np[row] = params.repetition_penalty != 1
        self.has_penalties_np[row] = bool(
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )
        self.has_rules_np[row] = self._rules[row] is not None
        self.num_logprobs_np[row] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs_np[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.has_processed_logprobs_np[row] = params.processed_logprobs
        self.num_prompt_tokens_np[row] = sampling.num_prompt_tokens
        has_filters = self.has_min_p_np[row] or self.top_k_np[row] or self.has_top_p_np[row]
        asks = {
            _TEMPERATURE: is_sampled,
            _FILTERS: has_filters,
            _TEXT: self.has_penalties_np[row] or self.has_rules_np[row],
            _LOGPROBS: params.logprobs is not None,
            _PROMPT_LOGPROBS: params.prompt_logprobs is not None,
        }
        self._asked_np[row] = sum(bit for bit, is_asked in asks.items() if is_asked)

    def _asks(self, batch_rows: Sequence[int], bit: int) -> bool:
        """Whether a request of the batch does."""
        return bool(np.bitwise_or.reduce(self._asked_np[batch_rows]) & bit)

    def is_any_logprob(self, batch_rows: Sequence[int]) -> bool:
        return self._asks(batch_rows, _LOGPROBS)

    def is_any_prompt_logprob(self, batch_rows: Sequence[int]) -> bool:
        return self._asks(batch_rows, _PROMPT_LOGPROBS)

    def is_any_sampled(self, batch_rows: Sequence[int]) -> bool:
        return self._asks(batch_rows, _TEMPERATURE)

    def needs_filters(self, batch_rows: Sequence[int]) -> bool:
        """Whether a request of the batch asks for min_p, top_k or top_p."""
        return self._asks(batch_rows, _FILTERS)

    def needs_host(self, batch_rows: Sequence[int]) -> bool:
        """Whether a request of the batch asks for penalties, token rules or log-probabilities."""
        return self._asks(batch_rows, _TEXT | _LOGPROBS)

    def tempered_rows(
        self, persistent_rows: torch.Tensor, positions: torch.Tensor, token_rows: torch.Tensor | None
    ) -> SamplingRows:
        """As `filtered_rows`, of a batch that needs no filters."""
        every = self.filtered_rows(persistent_rows, positions, token_rows)
        return replace(every, min_p=None, top_k=None, top_p=None)

    def filtered_rows(
        self, persistent_rows: torch.Tensor, positions: torch.Tensor, token_rows: torch.Tensor | None
    ) -> SamplingRows:
        """Parameters of the logits rows of a batch that needs no more than filters, whoever asks for which; greedy rows
        are among them.

        persistent_rows: [num_logits] int64, of each logits row. positions: [num_tokens] int64, of the step's rows.
        token_rows: [num_logits] int64, which of these give logits; None: each, in order.
        """
        if fusion.is_fused(persistent_rows):
            from specbench.engine.kernels.sampling_rows import gather_rows

            found = gather_rows(persistent_rows, positions, token_rows, self._whole, self._real)
            return SamplingRows(found.keys, found.positions, found.temperature, found.min_p, found.top_k, found.top_p)
        return SamplingRows(
            keys=self.key[persistent_rows],
            positions=(positions if token_rows is None else positions[token_rows]) + 1,
            temperature=self.temperature[persistent_rows],
            min_p=self.min_p[persistent_rows],
            top_k=self.top_k[persistent_rows],
            top_p=self.top_p[persistent_rows],
        )

    def rows(
        self,
        batch_rows: Sequence[int],
        logits_start_loc: Sequence[int],
        persistent_rows: torch.Tensor,
        positions: torch.Tensor,
        token_pool: torch.Tensor,
    ) -> SamplingRows | None:
        """Parameters of the logits rows of a batch; None when every request is greedy and asks for nothing.

        batch_rows: persistent row of each request, on the host. logits_start_loc: [num_requests + 1], first logits row
        of each request. persistent_rows: [num_logits] int64, of each logits row. positions: [num_logits] int64, of the
        tokens to be sampled. token_pool: [num_rows, width] int64, no narrower than any position.
        """
        is_sampled = self.is_any_sampled(batch_rows)
        has_penalties, has_rules = self.has_penalties_np[batch_rows].any(), self.has_rules_np[batch_rows].any()
        if not (is_sampled or has_penalties or has_rules):
            return None
        has_top_k = self.top_k_np[batch_rows].any()
        has_min_p, has_top_p = self.has_min_p_np[batch_rows].any(), self.has_top_p_np[batch_rows].any()
        return SamplingRows(
            keys=self.key[persistent_rows],
            positions=positions,
            temperature=self.temperature[persistent_rows] if is_sampled else None,
            min_p=self.min_p[persistent_rows] if has_min_p else None,
            top_k=self.top_k[persistent_rows] if has_top_k else None,
            top_p=self.top_p[persistent_rows] if has_top_p else None,
            penalties=self._penalties(batch_rows, persistent_rows, positions, token_pool) if has_penalties else None,
            ruled=self._ruled(batch_rows, logits_start_loc, token_pool) if has_rules else (),
        )

    def _penalties(
        self, batch_rows: Sequence[int], persistent_rows: torch.Tensor, positions: torch.Tensor, pool: torch.Tensor
    ) -> PenaltyRows:
        has_repetition = self.has_repetition_np[batch_rows].any()
        return PenaltyRows(
            repetition=self.repetition[persistent_rows] if has_repetition else None,
            presence=self.presence[persistent_rows],
            frequency=self.frequency[persistent_rows],
            token_ids=pool[persistent_rows],
            num_prompt_tokens=self.num_prompt_tokens[persistent_rows],
            num_tokens=positions,
        )

    def _ruled(
        self, batch_rows: Sequence[int], logits_start_loc: Sequence[int], pool: torch.Tensor
    ) -> tuple[RuledRows, ...]:
        found = []
        for index, row in enumerate(batch_rows):
            rules = self._rules[row]
            start, stop = logits_start_loc[index], logits_start_loc[index + 1]
            if rules is not None and start < stop:
                found.append(RuledRows(rules, start, stop, pool[row]))
        return tuple(found)


def _real_parameters(params: SamplingParams) -> tuple[float, ...]:
    """In the order of the rows of SamplingState's tensor."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if params.temperature < MIN_TEMPERATURE:
        return (0.0, 0.0, 1.0, *penalties)
    return (params.temperature, params.min_p, params.top_p, *penalties)
