"""Whether two runs wrote the same text, token by token, for every sample.

Belongs here: pairing samples, the first token that differs, counts. Does not belong here: whether a difference matters
(the output check of a run knows near ties), figures.

A request that failed in either run has no text to compare and is counted apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.records import RequestRecord, SampleRecord
from specbench.reports.latency import is_completed
from specbench.reports.number_format import count
from specbench.reports.table import Cell, ReportTable, text_cell

#: (sample_id, turn, repeat)
SampleKey = tuple[str, int, int]
#: Differing samples that a report lists.
NUM_LISTED = 10


@dataclass(frozen=True, slots=True)
class TextDifference:
    """One sample whose outputs differ. Positions and lengths are in output tokens; in characters without token ids."""

    sample_id: str
    turn: int
    repeat: int
    first_difference_at: int
    base_length: int
    new_length: int


@dataclass(frozen=True, slots=True)
class TextComparison:
    """Outputs of two runs, sample by sample."""

    compared: int
    identical: int
    #: In the order of the base run's samples.
    differences: tuple[TextDifference, ...]
    #: In both runs, but failed or aborted in one of them.
    failed: int
    only_base: int
    only_new: int
    #: Samples compared as characters, since a run has no token ids of them.
    as_characters: int
    #: Samples whose prompts differ, where both are known.
    different_prompts: int

    @property
    def is_identical(self) -> bool:
        """Whether every sample of either run was compared and is the same."""
        unseen = self.failed + self.only_base + self.only_new
        return self.compared > 0 and self.identical == self.compared and unseen == 0


def compare_texts(
    base_requests: Sequence[RequestRecord],
    base_samples: Sequence[SampleRecord],
    new_requests: Sequence[RequestRecord],
    new_samples: Sequence[SampleRecord],
) -> TextComparison:
    """Compare by (sample, turn, repeat)."""
    base, new = _by_key(base_samples), _by_key(new_samples)
    failed = _failed(base_requests) | _failed(new_requests)
    shared = [key for key in base if key in new]
    pairs = [(base[key], new[key]) for key in shared if key not in failed]
    found = [(pair, _first_difference(*pair)) for pair in pairs]
    differences = tuple(_difference(*pair, at) for pair, at in found if at is not None)
    return TextComparison(
        compared=len(pairs),
        identical=len(pairs) - len(differences),
        differences=differences,
        failed=len(shared) - len(pairs),
        only_base=len(base) - len(shared),
        only_new=len(new) - len(shared),
        as_characters=sum(not _has_token_ids(*pair) for pair in pairs),
        different_prompts=sum(_prompts_differ(*pair) for pair in pairs),
    )


def text_sentence(texts: TextComparison) -> str:
    """The verdict with its counts, on one line."""
    if texts.compared == 0:
        return "Texts: **nothing to compare**"
    if texts.identical == texts.compared:
        parts = [f"Texts: **identical**, token by token, in all {count(texts.compared)} outputs compared"]
    else:
        differing = count(len(texts.differences))
        parts = [f"Texts: **different** in {differing} of {count(texts.compared)} outputs compared token by token"]
    unseen = {
        "failed in either run": texts.failed,
        "only in the base run": texts.only_base,
        "only in the new run": texts.only_new,
        "compared as characters, for want of token ids": texts.as_characters,
        "asked with different prompts": texts.different_prompts,
    }
    return "; ".join([*parts, *(f"{count(number)} {what}" for what, number in unseen.items() if number)])


def text_table(texts: TextComparison, label: str) -> ReportTable | None:
    """The first few samples that differ; None where none does."""
    if not texts.differences:
        return None
    listed = texts.differences[:NUM_LISTED]
    rows = [
        (
            text_cell(one.sample_id),
            *(
                Cell(number, count(number))
                for number in (one.turn, one.repeat, one.first_difference_at, one.base_length, one.new_length)
            ),
        )
        for one in listed
    ]
    rest = len(texts.differences) - len(listed)
    return ReportTable(
        name="texts",
        title=f"Texts that differ, {label}",
        header=("Sample", "Turn", "Repeat", "First difference at", "Base length", "New length"),
        rows=tuple(rows),
        notes=(f"{count(rest)} more are in the JSON form of this comparison.",) if rest else (),
    )


def _by_key(samples: Sequence[SampleRecord]) -> dict[SampleKey, SampleRecord]:
    return {(sample.sample_id, sample.turn, sample.repeat): sample for sample in samples}


def _failed(requests: Sequence[RequestRecord]) -> set[SampleKey]:
    return {
        (request.sample_id, request.turn, request.repeat)
        for request in requests
        if not request.is_warmup and not is_completed(request)
    }


def _has_token_ids(base: SampleRecord, new: SampleRecord) -> bool:
    """An output without ids is believed to be empty only where its text is empty too."""
    return all(len(sample.output_token_ids) > 0 or not sample.output_text for sample in (base, new))


def _first_difference(base: SampleRecord, new: SampleRecord) -> int | None:
    """Index of the first token (character) that only one has or that differs; None where there is none."""
    if not _has_token_ids(base, new):
        return _first_character(base.output_text, new.output_text)
    if base.output_token_ids == new.output_token_ids:
        return None
    first, second = np.asarray(base.output_token_ids), np.asarray(new.output_token_ids)
    shorter = min(len(first), len(second))
    differing = np.flatnonzero(first[:shorter] != second[:shorter])
    if len(differing):
        return int(differing[0])
    return None if len(first) == len(second) else shorter


def _first_character(base: str, new: str) -> int | None:
    if base == new:
        return None
    shorter = min(len(base), len(new))
    return next((index for index in range(shorter) if base[index] != new[index]), shorter)


def _difference(base: SampleRecord, new: SampleRecord, at: int) -> TextDifference:
    has_ids = _has_token_ids(base, new)
    lengths = [len(sample.output_token_ids if has_ids else sample.output_text) for sample in (base, new)]
    return TextDifference(base.sample_id, base.turn, base.repeat, at, *lengths)


def _prompts_differ(base: SampleRecord, new: SampleRecord) -> bool:
    if base.prompt_token_ids is not None and new.prompt_token_ids is not None:
        return list(base.prompt_token_ids) != list(new.prompt_token_ids)
    return base.prompt is not None and new.prompt is not None and base.prompt != new.prompt
