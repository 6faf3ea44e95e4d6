"""Drafts taken from a recorded text and spoilt on purpose, so that any accepted count occurs when it is wanted.

The recorded text is what plain decoding says, so a draft is right until this proposer makes it wrong. At each of a
request's steps it decides how many drafts shall be accepted, spoils the one behind them, and leaves those behind that
right: a verification that misses the first wrong draft shows. The number of drafts is free, and the decision belongs to
the request (its own steps, or its random key), never to the batch.

File: JSON lines with `prompt_token_ids` and `output_token_ids`. A prompt that occurs twice counts once, the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.config import EngineConfig
from specbench.engine.layers import fusion
from specbench.engine.layers.to_device import to_device
from specbench.engine.models.target import TargetModel
from specbench.engine.proposers.proposer import AdmittedRequest, DraftBatch, ProposerRequirements
from specbench.errors import UserError


class StubProposer:
    """The proposer. It remembers the recorded text of each row, and how far the row's decisions have gone."""

    #: What it wants accepted is decided on the host.
    is_capturable = False
    is_capturable_mixed = False
    encodes_content = False

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        assert config.drafts is not None
        self.k = config.num_speculative_tokens
        # One for requests of padding.
        self.num_rows = config.max_num_seqs + 1
        # Drafts are read up to k columns behind the newest token.
        self.width = config.max_model_len + self.k
        self.accepted_counts = config.accepted_counts
        self.accepted_rates = config.accepted_rates
        self.drafts_file = Path(config.drafts)
        # persistent row -> accepted counts that are wanted at its next steps
        self._wanted: dict[int, Iterator[int]] = {}

    def requirements(self) -> ProposerRequirements:
        return ProposerRequirements(
            num_speculative_tokens=self.k,
            cache_groups=(),
            num_prompt_lookahead=0,
            fixed_bytes=self.num_rows * self.width * torch.int64.itemsize,
        )

    def load(self, target: TargetModel) -> None:
        self.recorded = RecordedOutputs.read(self.drafts_file, target.vocab_size)
        # [max_num_seqs + 1, width] int64: prompt and recorded output of each row's request; -1 where nothing is known
        self.text = torch.full((self.num_rows, self.width), -1, dtype=torch.int64, device=target.device)

    def propose(self, batch: DraftBatch) -> None:
        for request in batch.admitted:
            self._admit(request)
        if not batch.is_read:
            return
        wanted_np = [
            0 if is_partial else next(self._wanted[row])
            for row, is_partial in zip(batch.rows_np, batch.is_partial_np, strict=True)
        ]
        (wanted,) = to_device([np.asarray(wanted_np)], self.text.device)
        # The columns of a partial chunk's drafts lie past the text: they are not read.
        if fusion.is_fused(self.text):
            from specbench.engine.kernels.drafts import store_recorded

            store_recorded(self.text, batch.token_pool, batch.rows, batch.draft_columns, wanted, self.k)
        else:
            batch.write_drafts(recorded_drafts(self.text, batch.rows, batch.draft_columns, wanted, self.k))

    def release(self, rows: list[int]) -> None:
        for row in rows:
            self._wanted.pop(row, None)

    def _admit(self, request: AdmittedRequest) -> None:
        text = self.recorded.continue_text(request.token_ids)[: self.width]
        (token_ids,) = to_device([np.asarray(text)], self.text.device)
        self.text[request.row] = -1
        self.text[request.row, : len(text)] = token_ids
        if self.accepted_rates is not None:
            self._wanted[request.row] = draw_accepted_counts(self.accepted_rates, request.key)
        else:
            assert self.accepted_counts is not None
            # Requests that run side by side begin at different places.
            offset = request.key % len(self.accepted_counts)
            self._wanted[request.row] = islice(cycle(self.accepted_counts), offset, None)


def recorded_drafts(text: Tensor, rows: Tensor, columns: Tensor, wanted: Tensor, k: int) -> Tensor:
    """text [any, width] int64 (-1: nothing is known); rows, columns, wanted [num_requests] int64 -> [num_requests, k]:
    what the text has from there on, number `wanted` made wrong. Past the width its last column counts."""
    index = torch.arange(k, device=text.device)
    right = text[rows[:, None], (columns[:, None] + index).clamp_max(text.shape[1] - 1)]
    wrong = torch.where(right > 0, right - 1, 1)
    is_spoilt = (index == wanted[:, None]) & (right >= 0)
    return torch.where(is_spoilt, wrong, right)


def draw_accepted_counts(rates: tuple[float, ...], key: int) -> Iterator[int]:
    """Independent counts, of which a share rates[i] is above i. Same key, same counts."""
    generator = np.random.default_rng(key & (2**64 - 1))
    while True:
        # One uniform number decides all positions: it is below rates[i] exactly where the count is above i.
        yield int((generator.random() < np.asarray(rates)).sum())


class RecordedOutputs:
    """What plain decoding said to each prompt."""

    def __init__(self, output_of_prompt: dict[tuple[int, ...], list[int]]):
        self._output_of_prompt = output_of_prompt
        # Longest first: a prompt may begin with another one and its output.
        self._prompt_lengths = sorted({len(prompt) for prompt in output_of_prompt}, reverse=True)

    @classmethod
    def read(cls, file: Path, vocab_size: int) -> RecordedOutputs:
        """UserError naming file and line for anything but rows as this file's charter describes them, of ids that the
        vocabulary has."""
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"spec.drafts: {file} cannot be read ({error}); name a file of JSON lines") from error
        outputs: dict[tuple[int, ...], list[int]] = {}
        for number, line in enumerate(lines, start=1):
            if line.strip():
                prompt, output = _read_row(line, vocab_size, f"spec.drafts: {file} line {number}")
                outputs.setdefault(prompt, output)
        if not outputs:
            raise UserError(f"spec.drafts: {file} has no rows; record a plain run first")
        return cls(outputs)

    def continue_text(self, token_ids: Sequence[int]) -> list[int]:
        """`token_ids` (a prompt, or a prompt and part of its output) and what was recorded behind them."""
        for length in self._prompt_lengths:
            if length <= len(token_ids):
                output = self._output_of_prompt.get(tuple(token_ids[:length]))
                if output is not None:
                    return [*token_ids, *output[len(token_ids) - length :]]
        return list(token_ids)


def _read_row(line: str, vocab_size: int, where: str) -> tuple[tuple[int, ...], list[int]]:
    try:
        row = json.loads(line)
        prompt, output = row["prompt_token_ids"], row["output_token_ids"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{where}: not an object with prompt_token_ids and output_token_ids ({type(error).__name__}); correct it"
        ) from error
    for ids in (prompt, output):
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise UserError(
                f"{where}: token ids must be lists of whole numbers in 0 .. {vocab_size - 1}, the vocabulary; correct "
                "it"
            )
    return tuple(prompt), output
