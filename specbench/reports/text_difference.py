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
#: Outputs that a report lists.
NUM_LISTED = 10


@dataclass(frozen=True, slots=True)
class Output:
    """What one run wrote for a sample."""

    #: In output tokens; in characters where a run has no token ids of the sample.
    length: int
    is_truncated: bool
    #: As the headline scorer read it.
    answer: str | None


@dataclass(frozen=True, slots=True)
class ComparedOutput:
    """The outputs of both runs for one sample."""

    sample_id: str
    turn: int
    repeat: int
    #: Index of the first token that differs or that only one has; None where the outputs are identical.
    first_difference_at: int | None
    base: Output
    new: Output


@dataclass(frozen=True, slots=True)
class TextComparison:
    """Outputs of two runs, sample by sample."""

    #: In the order of the base run's samples.
    outputs: tuple[ComparedOutput, ...]
    #: In both runs, but failed or aborted in one of them.
    failed: int
    only_base: int
    only_new: int
    #: Samples compared as characters, since a run has no token ids of them.
    as_characters: int
    #: Samples whose prompts differ, where both are known.
    different_prompts: int

    @property
    def compared(self) -> int:
        return len(self.outputs)

    @property
    def differing(self) -> tuple[ComparedOutput, ...]:
        return tuple(one for one in self.outputs if one.first_difference_at is not None)

    @property
    def identical(self) -> int:
        return self.compared - len(self.differing)

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
    scorer: str | None,
) -> TextComparison:
    """Compare by (sample, turn, repeat). `scorer` is the one whose reading of an answer is shown."""
    base, new = _by_key(base_samples), _by_key(new_samples)
    failed = _failed(base_requests) | _failed(new_requests)
    shared = [key for key in base if key in new]
    pairs = [(base[key], new[key]) for key in shared if key not in failed]
    return TextComparison(
        outputs=tuple(_compared(*pair, scorer) for pair in pairs),
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
        differing = count(len(texts.differing))
        parts = [f"Texts: **different** in {differing} of {count(texts.compared)} outputs compared token by token"]
    unseen = {
        "failed in either run": texts.failed,
        "only in the base run": texts.only_base,
        "only in the new run": texts.only_new,
        "compared as characters, for want of token ids": texts.as_characters,
        "asked with different prompts": texts.different_prompts,
    }
    return "; ".join([*parts, *(f"{count(number)} {what}" for what, number in unseen.items() if number)])


def text_table(texts: TextComparison, base_label: str, new_label: str) -> ReportTable | None:
    """The first few outputs, those that differ before those that do not; None where none was compared."""
    if not texts.outputs:
        return None
    listed = sorted(texts.outputs, key=lambda one: one.first_difference_at is None)[:NUM_LISTED]
    rest = texts.compared - len(listed)
    return ReportTable(
        name="texts",
        title=f"Outputs, {new_label} against {base_label}",
        header=("Sample", "Turn", "Repeat", base_label, new_label, "Token by token"),
        rows=tuple(map(_row, listed)),
        num_text_columns=6,
        notes=(f"{count(rest)} more are in the JSON form of this comparison.",) if rest else (),
    )


def _row(one: ComparedOutput) -> tuple[Cell, ...]:
    at = one.first_difference_at
    verdict = "identical" if at is None else f"first difference at {count(at)}"
    return (
        text_cell(one.sample_id),
        *(Cell(number, count(number)) for number in (one.turn, one.repeat)),
        *(Cell(output.length, _summary(output)) for output in (one.base, one.new)),
        Cell(at, verdict),
    )


def _summary(output: Output) -> str:
    """`4,709 tokens, answer 70`, `16,384 tokens (hit the limit)`"""
    length = f"{count(output.length)} tokens"
    if output.is_truncated:
        return f"{length} (hit the limit)"
    return length if output.answer is None else f"{length}, answer {output.answer}"


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


def _compared(base: SampleRecord, new: SampleRecord, scorer: str | None) -> ComparedOutput:
    has_ids = _has_token_ids(base, new)
    outputs = [
        Output(
            length=len(sample.output_token_ids if has_ids else sample.output_text),
            is_truncated=sample.is_truncated,
            answer=None if scorer is None else sample.extracted.get(scorer),
        )
        for sample in (base, new)
    ]
    return ComparedOutput(base.sample_id, base.turn, base.repeat, _first_difference(base, new), *outputs)


def _prompts_differ(base: SampleRecord, new: SampleRecord) -> bool:
    if base.prompt_token_ids is not None and new.prompt_token_ids is not None:
        return list(base.prompt_token_ids) != list(new.prompt_token_ids)
    return base.prompt is not None and new.prompt is not None and base.prompt != new.prompt
