"""The output check: emitted tokens fed back without speculation, one token a step, and the argmax compared at each.

It shares the model and the cache pools with the engine, and nothing else: no scheduler, no request rows, no
verification, no proposer. So it is plain decoding, and a second opinion on all of those.

Belongs here: feeding back and comparing. Does not belong here: what a verdict does to a report (reports/), the test of
laws at a temperature (evals/losslessness.py).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specbench.engine.content.hearing import hear
from specbench.engine.content.placement import PlacedContent, content_between
from specbench.engine.execution.features import step_content
from specbench.engine.layers.metadata import RowLayout, num_table_columns
from specbench.engine.layers.metadata_builder import AttentionMetadataBuilder
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.proposers.row_indices import row_indices
from specbench.engine.sampling.parameters import RequestSampling, bad_word_sequences, stop_ids
from specbench.engine.sampling.sampler import process
from specbench.engine.sampling.sampling_state import SamplingState
from specbench.engine.scheduling.kv_cache import KVCacheManager
from specbench.engine.scheduling.step import ContentWindow
from specbench.generate import GenerateResult, SamplingParams
from specbench.records import OutputCheck

#: Ids whose logits are kept of every single row, to be compared with the verify row on the same prefix.
_NUM_COMPARED_IDS = 8
_NUM_DIFFERENCES_KEPT = 10
#: Requests that the rows of k + 1 are computed for at a time, at least: fewer stand there several times over.
_NUM_TOGETHER = 8
#: Parts of the largest logit: a difference of more is no rounding of the type, and explains nothing. In bfloat16 a
#: router that decides otherwise counts as rounding.
_MOST_ROUNDING = {"float32": 1e-3, "bfloat16": 1 / 8}


def check_output(engine: LLMEngine, results: Sequence[GenerateResult], limit: int) -> OutputCheck:
    """Replay min(limit, all) finished greedy requests on an idle engine.

    Every emitted token must be the argmax of plain decoding on the tokens before it, under the request's penalties and
    whatever else it asks for. Where it is not, the difference is
    a near tie if the argmax leads by at most twice the largest logit difference seen here between single rows and rows
    of k + 1 on the same prefix, in batches that are larger where these are small: rounding of that size can turn the
    order of two logits, and products and attention may round by how many rows there are. A difference that no rounding
    makes allows no more than rounding would: what breaks rows of k + 1 must not excuse what comes of them.
    """
    assert not engine.has_requests
    engine.reset_prefix_cache()  # the replay writes over the blocks
    if limit == 0:
        return OutputCheck(status="not_checked", reason="report.output_check_requests=0")
    done = [result for result in results if result.record.error is None and result.output_token_ids]
    greedy = [result for result in done if result.record.finish_reason != "aborted"][:limit]
    if not greedy:
        return OutputCheck(status="not_checked", reason="no request finished with output")
    rows = [replayed for batch in _batches(engine, greedy) for replayed in _Replay(engine, batch).run()]
    return _judge(greedy, rows, _MOST_ROUNDING[engine.config.dtype])


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """Plain decoding's view of one request's emitted tokens, on the host."""

    # [num_output_tokens]: argmax, and how far it leads the emitted token's logit (0 where they are the same)
    argmax_np: np.ndarray
    margin_np: np.ndarray
    #: Largest logit difference between single rows and verify rows.
    max_logit_difference: float
    #: By size, of single rows.
    largest_logit: float
    #: Whether every logit was a number. Where one was not, the argmax says nothing.
    is_finite: bool


def _batches(engine: LLMEngine, results: list[GenerateResult]) -> Iterator[list[GenerateResult]]:
    """Batches whose requests can hold their caches at the same time."""
    batch: list[GenerateResult] = []
    blocks, capacity = 0, _num_blocks(engine)
    for result in results:
        needed = _blocks_of(engine, result)
        if batch and (len(batch) == engine.config.max_num_seqs or blocks + needed > capacity):
            yield batch
            batch, blocks = [], 0
        batch.append(result)
        blocks += needed
    yield batch


def _num_blocks(engine: LLMEngine) -> int:
    """For the requests of a batch. Windowed pools hold what max_num_seqs requests need, whatever their length."""
    sizes = zip(engine.memory.specs, engine.memory.num_blocks, strict=True)
    full_attention = [count - 1 for spec, count in sizes if spec.window is None and spec.owner == "target"]
    return min(full_attention, default=sys.maxsize)


def _blocks_of(engine: LLMEngine, result: GenerateResult) -> int:
    num_tokens = len(result.prompt_token_ids) + len(result.output_token_ids)
    return -(-num_tokens // engine.config.block_size)


class _Replay:
    """One batch of requests, run twice over the caches: single rows, then k + 1 rows a step."""

    def __init__(self, engine: LLMEngine, results: list[GenerateResult]):
        self.engine = engine
        self.results = results
        self.device = engine.model.device
        self.specs = engine.model.cache_groups()
        self.builder = AttentionMetadataBuilder(
            self.specs,
            engine.config.block_size,
            engine.model.relative_extents,
            self.device,
            engine.model.attention.needs_segments,
        )
        self.tokens = [result.prompt_token_ids + result.output_token_ids for result in results]
        self.content = [self._clips(result) for result in results]
        self.num_prompt = [len(result.prompt_token_ids) for result in results]
        self.sampling = SamplingState(len(results), engine.model.vocab_size, self.device)
        self.sampling.add(range(len(results)), [self._sampling_of(result) for result in results])

    def _clips(self, result: GenerateResult) -> tuple[PlacedContent, ...]:
        """Where the prompt's clips are, heard anew."""
        return self.engine.place_clips(result.prompt_token_ids, [hear(source) for source in result.audio])[1]

    def _sampling_of(self, result: GenerateResult) -> RequestSampling:
        """What the request asked for; its random key is not needed."""
        params = result.sampling or SamplingParams(len(result.output_token_ids))
        tokenizer = self.engine.tokenizer
        return RequestSampling(
            params,
            key=0,
            num_prompt_tokens=len(result.prompt_token_ids),
            stop_token_ids=stop_ids(params, self.engine.model_config.eos_token_ids),
            bad_words=bad_word_sequences(params, None if tokenizer is None else tokenizer.encode),
        )

    @torch.inference_mode()
    def run(self) -> list[ReplayedRequest]:
        singles = [_SingleRows(result.output_token_ids) for result in self.results]
        for request, first_output, logits in self._decode(num_rows=1):
            singles[request].add(first_output, logits, self._processed(request, first_output, logits))
        differences = [0.0] * len(self.results)
        num_verify_rows = self.engine.config.num_speculative_tokens + 1
        num_copies = self._num_copies()
        if num_verify_rows > 1 or num_copies > 1:
            crowd = self if num_copies == 1 else _Replay(self.engine, self.results * num_copies)
            for index, first_output, logits in crowd._decode(num_rows=num_verify_rows):
                request = index % len(self.results)
                difference = singles[request].difference(first_output, logits)
                differences[request] = max(differences[request], difference)
        return [single.finish(difference) for single, difference in zip(singles, differences, strict=True)]

    def _num_copies(self) -> int:
        """How often each request can stand in a larger batch."""
        most = min(_NUM_TOGETHER, self.engine.config.max_num_seqs) // len(self.results)
        needed = sum(_blocks_of(self.engine, result) for result in self.results)
        return max(1, min(most, _num_blocks(self.engine) // needed))

    def _processed(self, request: int, first_output: int, logits: torch.Tensor) -> torch.Tensor:
        """What the request's parameters make of these rows, [rows, vocab]."""
        tokens = torch.tensor(self.tokens[request], device=self.device).expand(len(self.tokens), -1)
        first_position = self.num_prompt[request] + first_output
        positions = torch.arange(first_position, first_position + len(logits), device=self.device)
        rows = self.sampling.rows([request], (0, len(logits)), torch.full_like(positions, request), positions, tokens)
        return logits if rows is None else process(logits.clone(), rows)

    def _decode(self, num_rows: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (request, index of the first output token, logits [rows, vocab]) of `num_rows` rows at a time.

        Row j's logits choose output token `first + j`. The first output token comes from the prompt's last row.
        """
        kv_cache = KVCacheManager(
            list(self.specs), self.engine.config.block_size, list(self.engine.memory.num_blocks[: len(self.specs)])
        )
        num_columns = num_table_columns(self.engine.config.max_model_len, self.engine.config.block_size)
        tables = torch.zeros(len(self.specs), len(self.tokens), num_columns, dtype=torch.int32, device=self.device)
        for request in range(len(self.tokens)):
            kv_cache.admit(request)
        computed = [0] * len(self.tokens)
        while True:
            counts = self._next_counts(computed, num_rows)
            if not counts:
                return
            hidden = self._forward(kv_cache, tables, computed, counts)
            start = 0
            for request, count in counts.items():
                end_position = computed[request] + count
                first_row = max(self.num_prompt[request] - 1 - computed[request], 0)
                if first_row < count:
                    logits = self.engine.model.compute_logits(hidden[start + first_row : start + count])
                    yield request, computed[request] + first_row + 1 - self.num_prompt[request], logits
                computed[request] = end_position
                kv_cache.confirm(request, end_position, end_position + 1)
                start += count

    def _next_counts(self, computed: list[int], num_rows: int) -> dict[int, int]:
        """Rows of each request's next step: what fits of a prompt, then `num_rows`, never the last emitted token."""
        budget = self.engine.config.max_num_batched_tokens
        counts: dict[int, int] = {}
        for request, tokens in enumerate(self.tokens):
            left_of_prompt = self.num_prompt[request] - computed[request]
            wanted = left_of_prompt if left_of_prompt > 0 else num_rows
            count = min(wanted, len(tokens) - 1 - computed[request], budget)
            if count > 0:
                counts[request] = count
                budget -= count
        return counts

    def _forward(
        self, kv_cache: KVCacheManager, tables: torch.Tensor, computed: list[int], counts: dict[int, int]
    ) -> torch.Tensor:
        """Hidden states after the final norm, [total rows, hidden]."""
        ids: list[int] = []
        for request, count in counts.items():
            end = computed[request] + count
            ids.extend(self.tokens[request][computed[request] : end])
            added = kv_cache.extend(request, end)
            assert added is not None, "a batch holds no more requests than the caches do"
            for group, start, block_ids in added:
                columns = slice(start + 1, start + 1 + len(block_ids))
                tables[group, request, columns] = torch.tensor(block_ids, dtype=torch.int32)
        requests = torch.tensor(list(counts), device=self.device)
        first_position = torch.tensor([computed[request] for request in counts], device=self.device)
        starts = (0, *itertools.accumulate(counts.values()))
        ends = [computed[request] + count for request, count in counts.items()]
        metadata = self.builder.build(tables[:, requests], RowLayout(starts, first_position, None, ends))
        embeds = self.engine.model.embed(torch.tensor(ids, device=self.device))
        content = step_content(self._windows(computed, counts), len(counts), self.device)
        if content is not None:
            assert self.engine.runner.content_encoder is not None
            features = content.encode(self.engine.runner.content_encoder.encode_content)
            embeds = features.merge(embeds, row_indices(starts, self.device).request_of_row, metadata.positions)
        return self.engine.model.forward(embeds, metadata, self.engine.caches).hidden_states

    def _windows(self, computed: list[int], counts: dict[int, int]) -> list[ContentWindow]:
        """The clips that these rows read."""
        windows = []
        for index, (request, count) in enumerate(counts.items()):
            start, end = computed[request], computed[request] + count
            pieces = content_between(self.content[request], start, end)
            if pieces:
                windows.append(ContentWindow(index, start, end, pieces))
        return windows


class _SingleRows:
    """What is kept of the single rows of one request."""

    def __init__(self, emitted: list[int]):
        self.emitted = emitted
        self.argmax_np = np.zeros(len(emitted), dtype=np.int64)
        self.margin_np = np.zeros(len(emitted))
        self.is_finite = True
        self.largest_logit = 0.0
        self.top: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, first_output: int, logits: torch.Tensor, processed: torch.Tensor) -> None:
        largest = float(logits.abs().max())
        self.is_finite &= math.isfinite(largest)
        self.largest_logit = max(self.largest_logit, largest)
        top = logits.topk(min(_NUM_COMPARED_IDS, logits.shape[-1]), dim=-1)
        for row, output_index in enumerate(range(first_output, first_output + len(logits))):
            lead = processed[row].max() - processed[row, self.emitted[output_index]]
            self.argmax_np[output_index] = int(processed[row].argmax())
            self.margin_np[output_index] = float(lead.nan_to_num())  # a banned token's is infinite, and JSON has none
            self.top[output_index] = (top.indices[row], top.values[row])

    def difference(self, first_output: int, logits: torch.Tensor) -> float:
        indices, values = zip(*(self.top[first_output + row] for row in range(len(logits))), strict=True)
        return float((logits.gather(1, torch.stack(indices)) - torch.stack(values)).abs().max())

    def finish(self, max_logit_difference: float) -> ReplayedRequest:
        return ReplayedRequest(self.argmax_np, self.margin_np, max_logit_difference, self.largest_logit, self.is_finite)


def _judge(results: list[GenerateResult], replayed: list[ReplayedRequest], most_rounding: float) -> OutputCheck:
    max_difference = max(request.max_logit_difference for request in replayed)
    largest_logit = max(request.largest_logit for request in replayed)
    allowed_margin = 2 * min(max_difference, most_rounding * largest_logit)
    num_identical, num_near_ties, num_mismatches = 0, 0, 0
    differences: list[dict] = []
    largest_margin = None
    for result, plain in zip(results, replayed, strict=True):
        wrong = np.flatnonzero(plain.argmax_np != np.asarray(result.output_token_ids))
        if not plain.is_finite:
            num_mismatches += 1
            continue
        if len(wrong) == 0:
            num_identical += 1
            continue
        margin = float(plain.margin_np[wrong].max())
        largest_margin = max(margin, largest_margin or 0.0)
        if margin <= allowed_margin:
            num_near_ties += 1
        else:
            num_mismatches += 1
        differences.extend(_difference(result, plain, int(index)) for index in wrong[:_NUM_DIFFERENCES_KEPT])
    status = "mismatch" if num_mismatches else "near_ties" if num_near_ties else "identical"
    return OutputCheck(
        status=status,
        compared=len(results),
        identical=num_identical,
        near_ties=num_near_ties,
        mismatches=num_mismatches,
        max_logit_difference=max_difference,
        largest_margin=largest_margin,
        allowed_margin=allowed_margin if math.isfinite(allowed_margin) else None,
        differences=differences[:_NUM_DIFFERENCES_KEPT],
        reason=None if all(plain.is_finite for plain in replayed) else "logits that are not finite",
    )


def _difference(result: GenerateResult, plain: ReplayedRequest, index: int) -> dict:
    return {
        "request_id": result.record.request_id,
        "output_index": index,
        "emitted": result.output_token_ids[index],
        "expected": int(plain.argmax_np[index]),
        "margin": float(plain.margin_np[index]),
    }
