"""A target and a drafter whose laws are tables: the next token depends on the last one and on its position.

Thousands of requests run at once, so that a law of sequences can be compared with what the engine emits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from scipy.stats import chi2

from specbench.engine.execution.model_runner import ModelRunner
from specbench.engine.layers.metadata import TargetOutput
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.proposers.proposer import DraftBatch, ProposerRequirements
from tests.engine.harness import make_engine
from tests.engine.tiny_inkling import build_tiny_inkling

if TYPE_CHECKING:
    from specbench.engine.kernels.sampling import ChunkBests

#: Tables repeat with this period along positions.
PERIOD = 3


def build_folder(folder: Path) -> Path:
    """A checkpoint as small as they get; only its cache groups and its vocabulary size are used."""
    return build_tiny_inkling(
        folder,
        num_modules=0,
        vocab_size=8,
        unpadded_vocab_size=8,
        num_hidden_layers=1,
        local_layer_ids=[],
        hidden_size=32,
        logits_mup_width_multiplier=0.5,
    )


class MarkovModel:
    """Row at position p with token t: logits table[p % PERIOD, t]."""

    def __init__(self, model: object, table: torch.Tensor):
        # [PERIOD, vocab, vocab]
        self._model, self._table = model, table
        self.vocab_size = table.shape[-1]

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids[:, None].float()

    def forward(self, embeds: torch.Tensor, metadata: object, caches: object) -> TargetOutput:
        hidden = torch.cat([metadata.positions[:, None].float(), embeds], dim=1)
        return TargetOutput(hidden, hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        position, token = hidden.long().unbind(1)
        return self._table[position % PERIOD, token]

    def compute_bests(self, hidden: torch.Tensor) -> ChunkBests:
        from specbench.engine.kernels.sampling import best_of_chunks

        return best_of_chunks(self.compute_logits(hidden))


class MarkovProposer:
    """Draws each draft from a table of its own, given the token before it. `missing`: chance of none, by draft."""

    is_capturable = True
    is_capturable_mixed = True
    encodes_content = False

    def __init__(self, table: torch.Tensor, k: int, missing: float = 0.0):
        self.table, self.k, self.missing = table, k, missing

    def requirements(self) -> ProposerRequirements:
        return ProposerRequirements(self.k, cache_groups=(), num_prompt_lookahead=0, fixed_bytes=0)

    def propose(self, batch: DraftBatch) -> None:
        for index in range(self.k):
            position = batch.draft_columns + index - 1
            before = batch.token_pool[batch.rows, position].clamp_min(0)
            token_ids = batch.sample_draft(index, self.table[position % PERIOD, before])
            is_missing = (batch.rows * 7 + position * 3 + index) % 10 < self.missing * 10
            batch.write_draft(index, torch.where(is_missing, -1, token_ids))

    def release(self, rows: list[int]) -> None:
        pass


def markov_engine(
    folder: Path,
    target: torch.Tensor,
    draft: torch.Tensor,
    k: int,
    *,
    missing: float = 0.0,
    draft_sample_method: str = "greedy",
    rejection_sample_method: str = "standard",
    synthetic_acceptance_rates: tuple[float, ...] = (),
    **config: object,
) -> LLMEngine:
    """An engine over two tables of logits, [PERIOD, vocab, vocab]."""
    settings = {"max_num_seqs": 2048, "max_num_batched_tokens": 1 << 14, "max_model_len": 16} | config
    engine = make_engine(folder, 0, num_speculative_tokens=k, **settings)
    engine.config = replace(
        engine.config,
        draft_sample_method=draft_sample_method,
        rejection_sample_method=rejection_sample_method,
        synthetic_acceptance_rates=synthetic_acceptance_rates,
    )
    proposer = MarkovProposer(draft, k, missing) if k else None
    engine.runner = ModelRunner(engine.config, MarkovModel(engine.model, target), proposer, engine.caches)
    engine.scheduler.config = replace(engine.scheduler.config, num_speculative_tokens=k)
    return engine


def exact_law(laws: torch.Tensor, prompt: tuple[int, ...], num_tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of each sequence of the tokens behind the first, which is summed over.

    laws: [PERIOD, vocab, vocab] probabilities.
    """
    law: Counter[tuple[int, ...]] = Counter()
    vocab = range(laws.shape[-1])
    table = laws.double().tolist()
    for sequence in itertools.product(vocab, repeat=num_tokens):
        probability, before = 1.0, prompt[-1]
        for index, token in enumerate(sequence):
            probability *= table[(len(prompt) - 1 + index) % PERIOD][before][token]
            before = token
        law[sequence[1:]] += probability
    return dict(law)


def p_value(observed: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Smallest of the p values of whole sequences and of each two neighbours, times their number. 0 for an impossible
    sequence. Pairs have few cells: what is wrong by a few percent shows there first."""
    if any(law.get(sequence, 0.0) == 0.0 for sequence in observed):
        return 0.0
    longest = max(map(len, law))
    p_values = [_chi_square(observed, law)]
    for place in range(longest - 1):
        part = slice(place, place + 2)
        p_values.append(_chi_square(_marginal(observed, part), _marginal(law, part)))
    return min(1.0, min(p_values) * len(p_values))


def _marginal(counts: Mapping[tuple[int, ...], float], part: slice) -> dict[tuple[int, ...], float]:
    sums: dict[tuple[int, ...], float] = {}
    for sequence, count in counts.items():
        sums[sequence[part]] = sums.get(sequence[part], 0) + count
    return sums


def _chi_square(observed: Mapping[tuple[int, ...], float], law: Mapping[tuple[int, ...], float]) -> float:
    """Cells that are expected fewer than 5 times are one."""
    total = sum(observed.values())
    cells, rare = [], [0.0, 0.0]
    for sequence, probability in law.items():
        expected, seen = total * probability, observed.get(sequence, 0)
        if expected < 5:
            rare = [rare[0] + expected, rare[1] + seen]
        else:
            cells.append((expected, seen))
    if rare[0] >= 5:
        cells.append((rare[0], rare[1]))
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    return float(chi2.sf(statistic, len(cells) - 1))
