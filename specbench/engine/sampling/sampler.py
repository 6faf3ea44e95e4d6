"""From logits to one sampled token a row: ordered passes, each skipped when no request of the batch asks for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.engine.sampling.noise import TARGET_SAMPLE, exponential_noise


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters gathered for the rows of one logits tensor."""

    # [num_rows] fp32; 0 is greedy
    temperature: torch.Tensor
    # [num_rows] int64; 0 is off
    top_k: torch.Tensor
    # [num_rows] fp32; 1 is off
    top_p: torch.Tensor
    # [num_rows] int64: request keys
    keys: torch.Tensor
    # [num_rows] int64: position of the token to be sampled
    positions: torch.Tensor
    any_top_k: bool
    any_top_p: bool


def process(logits: torch.Tensor, rows: SamplingRows | None) -> torch.Tensor:
    """The logits whose softmax is each row's law, fp32 [num_rows, vocab]. `rows` None: every row is greedy.

    A greedy row's law is all on its argmax: its logits come back without temperature.
    """
    if rows is None:
        return logits
    is_greedy = rows.temperature == 0
    processed = logits / torch.where(is_greedy, 1.0, rows.temperature)[:, None]  # pass 1: temperature
    if rows.any_top_k:
        processed = _mask_top_k(processed, rows.top_k)  # pass 2
    if rows.any_top_p:
        processed = _mask_top_p(processed, rows.top_p)  # pass 3
    return processed


def sample(processed: torch.Tensor, rows: SamplingRows | None) -> torch.Tensor:
    """Token ids, int64 [num_rows], from what `process` returned.

    A greedy tie goes to the lowest id. At a temperature the sample is argmax(logit - log E), E an Exp(1) variate keyed
    by (request key, position, id): the Gumbel-max draw from the softmax.
    """
    greedy_ids = processed.argmax(dim=-1)
    if rows is None:
        return greedy_ids
    vocab_ids = torch.arange(processed.shape[-1], device=processed.device)
    noise = exponential_noise(rows.keys, rows.positions, TARGET_SAMPLE, vocab_ids)
    return torch.where(rows.temperature == 0, greedy_ids, (processed - noise.log_()).argmax(dim=-1))


def _mask_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keep each row's top_k largest; entries equal to the k-th largest stay too. A top_k of 0 keeps all."""
    vocab_size = logits.shape[-1]
    kept = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    threshold = logits.sort(dim=-1, descending=True).values.gather(1, kept[:, None] - 1)
    return logits.masked_fill(logits < threshold, float("-inf"))


def _mask_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of most likely ids whose probability reaches top_p; at least one."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = values.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    # The comparison alone would drop ids for rows that ask for everything, where rounding takes the mass past 1.
    is_dropped = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    is_dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(is_dropped).scatter(1, ids, is_dropped), float("-inf"))
