"""Samples from a vocabulary that ranks share, without gathering it: each rank scores its own ids, and the best wins.

Belongs here: rows of which at most a temperature is asked. Does not belong here: what needs a whole row (filters,
penalties, laws): that runs on gathered logits, on every rank alike.
"""

from __future__ import annotations

import torch

from specbench.engine.layers.parallel import Vocabulary
from specbench.engine.sampling.noise import TARGET_SAMPLE, exponential_noise, spread_ids
from specbench.engine.sampling.row_chunks import row_chunks
from specbench.engine.sampling.sampler import SamplingRows, divide_by_temperature_


def sample_own(own_logits: torch.Tensor, rows: SamplingRows | None, vocabulary: Vocabulary) -> torch.Tensor:
    """What `process` and `sample` make of the whole rows, int64 [num_rows], on every rank: noise goes by global ids.

    own_logits: fp32 [num_rows, stop - start], changed in place.
    """
    if rows is None or rows.temperature is None:
        return vocabulary.argmax(own_logits)
    is_greedy = rows.temperature == 0
    divide_by_temperature_(own_logits, rows.temperature)
    if own_logits.is_cuda:
        from specbench.engine.kernels.sampling import NoiseRows, best_of_chunks

        noise_rows = NoiseRows(rows.keys, rows.positions, rows.temperature, TARGET_SAMPLE)
        return vocabulary.ids_of_bests(best_of_chunks(own_logits, noise_rows, vocabulary.start))
    ids = spread_ids(vocabulary.size, own_logits.device)[vocabulary.start : vocabulary.stop]
    for part in row_chunks(own_logits):
        noise = exponential_noise(rows.keys[part], rows.positions[part], TARGET_SAMPLE, ids).log_()
        own_logits[part] -= noise.masked_fill_(is_greedy[part, None], 0.0)
    return vocabulary.argmax(own_logits)
