"""From logits to one sampled token a row: ordered passes, each skipped when no request of the batch asks for it.

On a GPU the passes behind the penalties are kernels that read the logits as they are: `draw` needs none of what
`process` writes.

Belongs here: the order of the passes. Does not belong here: a pass (filters.py, penalties.py, token_rules.py), drafts
(verification.py), requests' parameters by row (sampling_state.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.engine.layers import fusion
from specbench.engine.sampling.filters import drop_below_, mask_min_p_, mask_top_k_, mask_top_p_
from specbench.engine.sampling.noise import TARGET_SAMPLE, exponential_noise, spread_ids
from specbench.engine.sampling.penalties import PenaltyRows
from specbench.engine.sampling.row_chunks import row_chunks
from specbench.engine.sampling.token_rules import TokenRules


@dataclass(frozen=True, slots=True)
class RuledRows:
    """One request's token rules and the logits rows that they hold for."""

    rules: TokenRules
    start: int
    stop: int
    # [width] int64: the request's row of the token pool
    token_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters gathered for the rows of one logits tensor. A pass that nobody asks for is None or empty."""

    # [num_rows] int64: request keys
    keys: torch.Tensor
    # [num_rows] int64: position of the token to be sampled
    positions: torch.Tensor
    # [num_rows] fp32; 0 is greedy. None: every row is
    temperature: torch.Tensor | None = None
    # [num_rows] fp32; 0 is off
    min_p: torch.Tensor | None = None
    # [num_rows] int64; 0 is off
    top_k: torch.Tensor | None = None
    # [num_rows] fp32; 1 is off
    top_p: torch.Tensor | None = None
    penalties: PenaltyRows | None = None
    ruled: tuple[RuledRows, ...] = ()

    @property
    def needs_whole_rows(self) -> bool:
        """Whether anything is asked for that looks at more than one id at a time, a temperature apart."""
        return bool(self.ruled) or self.has_filters or self.penalties is not None

    @property
    def has_filters(self) -> bool:
        return any(each is not None for each in (self.min_p, self.top_k, self.top_p))


@dataclass(frozen=True, slots=True)
class Support:
    """What filters leave of rows on a GPU: ids whose logit over temperature is no less than the threshold."""

    # [num_rows] fp32. None: all of it
    threshold: torch.Tensor | None
    # [num_rows] fp32: logarithm of the sum of their exponentials, where it was found on the way
    total: torch.Tensor | None


def process(logits: torch.Tensor, rows: SamplingRows | None) -> torch.Tensor:
    """The logits whose softmax is each row's law: fp32 [num_rows, vocab], changed in place. `rows` None: every row is
    greedy and asks for nothing.

    A greedy row's law is all on its argmax: its logits come back without temperature.
    """
    if rows is None:
        return logits
    apply_rules_(logits, rows)
    if rows.temperature is None:
        return logits
    support = support_of(logits, rows) if fusion.is_fused(logits) else None
    divide_by_temperature_(logits, rows.temperature)
    if support is None:
        _filter_(logits, rows)
    elif support.threshold is not None:
        drop_below_(logits, support.threshold)
    return logits


def divide_by_temperature_(logits: torch.Tensor, temperature: torch.Tensor) -> None:
    """In place on fp32 logits [num_rows, vocab]; those of greedy rows stay. temperature: [num_rows] fp32."""
    divisor = torch.where(temperature == 0, 1.0, temperature)[:, None]
    if fusion.is_fused(logits):
        # As kernels do, who would have to divide every logit each time they read it.
        logits *= 1 / divisor
    else:
        logits /= divisor


def apply_rules_(logits: torch.Tensor, rows: SamplingRows) -> None:
    """The passes before the temperature, in place: token rules and penalties."""
    for ruled in rows.ruled:
        part = slice(ruled.start, ruled.stop)
        ruled.rules.apply_(logits[part], rows.positions[part])
    if rows.penalties is not None:
        rows.penalties.apply_(logits)
    for ruled in rows.ruled:
        part = slice(ruled.start, ruled.stop)
        ruled.rules.ban_words_(logits[part], ruled.token_ids, rows.positions[part])


def _filter_(logits: torch.Tensor, rows: SamplingRows) -> None:
    if rows.min_p is not None:
        mask_min_p_(logits, rows.min_p)
    if rows.top_k is not None:
        mask_top_k_(logits, rows.top_k)
    if rows.top_p is not None:
        mask_top_p_(logits, rows.top_p)


def support_of(logits: torch.Tensor, rows: SamplingRows) -> Support:
    """By kernels, without waiting: of fp32 logits [num_rows, vocab] behind rules and penalties, before temperature."""
    from specbench.engine.kernels.filters import Filters, kept

    assert rows.temperature is not None
    if not rows.has_filters:
        return Support(None, None)
    new = torch.full_like
    found = kept(
        logits,
        Filters(
            rows.temperature,
            new(rows.temperature, 0) if rows.min_p is None else rows.min_p,
            new(rows.keys, 0) if rows.top_k is None else rows.top_k,
            new(rows.temperature, 1) if rows.top_p is None else rows.top_p,
        ),
    )
    return Support(found.threshold, found.total)


def sample(processed: torch.Tensor, rows: SamplingRows | None) -> torch.Tensor:
    """Token ids, int64 [num_rows], from what `process` returned.

    A greedy tie goes to the lowest id. At a temperature the sample is argmax(logit - log E), E an Exp(1) variate keyed
    by (request key, position, id): the Gumbel-max draw from the softmax.
    """
    if rows is None or rows.temperature is None:
        return greedy_ids(processed)
    ids = spread_ids(processed.shape[-1], processed.device)
    sampled_ids = torch.empty(len(processed), dtype=torch.int64, device=processed.device)
    for part in row_chunks(processed):
        noise = exponential_noise(rows.keys[part], rows.positions[part], TARGET_SAMPLE, ids)
        sampled_ids[part] = torch.sub(processed[part], noise.log_(), out=noise).argmax(dim=-1)
    return torch.where(rows.temperature == 0, greedy_ids(processed), sampled_ids)


def draw(logits: torch.Tensor, rows: SamplingRows | None) -> torch.Tensor:
    """What `sample` makes of what `process` makes of these logits, int64 [num_rows]. Whether they are changed depends
    on the device."""
    if not fusion.is_fused(logits) or rows is None or rows.temperature is None:
        return sample(process(logits, rows), rows)
    from specbench.engine.kernels.sampling import NoiseRows
    from specbench.engine.kernels.tempered_sampling import tempered_ids

    apply_rules_(logits, rows)
    noise = NoiseRows(rows.keys, rows.positions, rows.temperature, TARGET_SAMPLE)
    return tempered_ids(logits, noise, support_of(logits, rows).threshold)


def greedy_ids(logits: torch.Tensor) -> torch.Tensor:
    """The argmax of each row of [num_rows, vocab], int64 [num_rows]; a tie goes to the lowest id."""
    if fusion.is_fused(logits) and logits.dtype == torch.float32:
        from specbench.engine.kernels.sampling import best_ids

        return best_ids(logits)
    return logits.argmax(dim=-1)
