"""Position-0 outcomes of two runs at the same token of the same text, one to one.

Belongs here: the join of two greedy runs on (sample, turn, repeat, output_index), the counts of agreement. Does not
belong here: averages over different tokens (decomposition.py), text (same_token_section.py).

Two runs with different k begin their steps at different tokens, so their averages at position 0 are over different
text. Where both begin a step at the same token, behind the same tokens, the question is one: is the draft of this token
right? Equal drafters answer alike at every such token. Texts are followed up to their first difference, that token
excluded: from there on "right" means another token. A turn behind turns that differ, or with another prompt, is left
out: it stands behind other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.records import RequestRecord, SampleRecord
from specbench.reports.drafted_run import DraftedRun
from specbench.reports.statistics import Difference, Ratios, mcnemar, paired_difference

#: Tokens at which the outcomes differ that are listed.
NUM_LISTED = 10
#: (sample_id, turn, repeat)
_TextKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Flip:
    """A token that one run's draft had right and the other's wrong."""

    sample_id: str
    turn: int
    repeat: int
    #: Of the token, among the request's output tokens.
    output_index: int
    is_only_new: bool


@dataclass(frozen=True, slots=True)
class SameToken:
    """Outcomes at the tokens where both runs begin a step with drafts."""

    base_label: str
    new_label: str
    #: Texts that both runs wrote, by (sample, turn, repeat), after the same prompt, with a token in common.
    num_texts: int
    #: Texts of both that are left out: other prompt, other earlier turns, no token ids or no token in common.
    num_left_out: int
    #: Of these, the same to the last token.
    num_identical_texts: int
    #: Output tokens before the first difference.
    num_common_tokens: int
    #: Steps with drafts that begin at a common token.
    base_drafts: int
    new_drafts: int
    #: Tokens that both drafted first, by who had them right.
    both: int
    only_base: int
    only_new: int
    neither: int
    #: Exact McNemar of only_base against only_new; None where nothing was compared.
    p_value: float | None
    #: Accepted share at the same tokens, with an interval over samples.
    difference: Difference
    #: The first few tokens with different outcomes, in the order of base's requests.
    flips: tuple[Flip, ...]

    @property
    def compared(self) -> int:
        return self.both + self.only_base + self.only_new + self.neither

    @property
    def agrees_at_all(self) -> bool:
        return self.compared > 0 and self.only_base + self.only_new == 0


@dataclass(frozen=True, slots=True, eq=False)
class _CommonTexts:
    """Texts that both runs wrote, in the order of base's requests; token i of text t is at start[t] + i on one tape."""

    keys: list[_TextKey]
    #: [num_texts] Output tokens before the first difference.
    num_common: np.ndarray
    num_identical: int
    num_left_out: int

    @property
    def start(self) -> np.ndarray:
        """[num_texts + 1] First place of each text on the tape, and its end."""
        return np.concatenate([[0], np.cumsum(self.num_common)])


def same_token_check(base: DraftedRun, new: DraftedRun) -> SameToken:
    """Compare outcomes one to one. Both runs must be greedy and of one target; linear in the steps of both."""
    texts = _common_texts(base.samples, new.samples)
    base_outcome, new_outcome = _outcomes(base, texts), _outcomes(new, texts)
    is_compared = (base_outcome >= 0) & (new_outcome >= 0)
    place = np.flatnonzero(is_compared)
    cell = 2 * base_outcome[place].astype(np.int64) + new_outcome[place]
    neither, only_new, only_base, both = np.bincount(cell, minlength=4).tolist()
    text = np.searchsorted(texts.start, place, side="right") - 1
    return SameToken(
        base_label=base.label,
        new_label=new.label,
        num_texts=len(texts.keys),
        num_left_out=texts.num_left_out,
        num_identical_texts=texts.num_identical,
        num_common_tokens=int(texts.start[-1]),
        base_drafts=int((base_outcome >= 0).sum()),
        new_drafts=int((new_outcome >= 0).sum()),
        both=both,
        only_base=only_base,
        only_new=only_new,
        neither=neither,
        p_value=mcnemar(only_base, only_new) if len(place) else None,
        difference=_difference(texts, text, cell),
        flips=_flips(texts, text, place, cell),
    )


def _common_texts(base: Sequence[SampleRecord], new: Sequence[SampleRecord]) -> _CommonTexts:
    of_new = {_key(sample): sample for sample in new}
    shared = [(sample, of_new[_key(sample)]) for sample in base if _key(sample) in of_new]
    differing: set[tuple[str, int]] = set()
    common_of: dict[_TextKey, int] = {}
    num_identical = 0
    for first, second in sorted(shared, key=lambda pair: pair[0].turn):
        conversation = (first.sample_id, first.repeat)
        num_common = _num_common(first.output_token_ids, second.output_token_ids)
        if conversation not in differing and num_common and _has_same_prompt(first, second):
            common_of[_key(first)] = num_common
        is_identical = num_common == len(first.output_token_ids) == len(second.output_token_ids)
        num_identical += is_identical and _key(first) in common_of
        if not is_identical:
            differing.add(conversation)
    keys = [_key(first) for first, _ in shared if _key(first) in common_of]
    return _CommonTexts(
        keys, np.array([common_of[key] for key in keys], np.int64), num_identical, num_left_out=len(shared) - len(keys)
    )


def _has_same_prompt(first: SampleRecord, second: SampleRecord) -> bool:
    """As far as both recorded one."""
    if first.prompt_token_ids is not None and second.prompt_token_ids is not None:
        return list(first.prompt_token_ids) == list(second.prompt_token_ids)
    return first.prompt is None or second.prompt is None or first.prompt == second.prompt


def _key(record: SampleRecord | RequestRecord) -> _TextKey:
    return record.sample_id, record.turn, record.repeat


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens before the first difference."""
    shorter = min(len(first), len(second))
    differing = np.flatnonzero(np.asarray(first)[:shorter] != np.asarray(second)[:shorter])
    return int(differing[0]) if len(differing) else shorter


def _outcomes(run: DraftedRun, texts: _CommonTexts) -> np.ndarray:
    """[num_common_tokens] Of the step with drafts that begins there: 1 first draft accepted, 0 rejected; -1 no step."""
    text_of = {key: text for text, key in enumerate(texts.keys)}
    columns = run.columns
    text = np.array([text_of.get(_key(request), -1) for request in columns.requests], np.int64)
    num_common = np.where(text >= 0, np.append(texts.num_common, 0)[text], 0)
    outcomes = np.full(texts.start[-1], -1, np.int8)
    is_compared = columns.is_draft & (columns.output_index >= 0)
    is_compared &= columns.output_index < num_common[columns.request]
    place = texts.start[text][columns.request[is_compared]] + columns.output_index[is_compared]
    outcomes[place] = columns.num_accepted[is_compared] > 0
    return outcomes


def _difference(texts: _CommonTexts, text: np.ndarray, cell: np.ndarray) -> Difference:
    """Of the accepted share, given [num_compared] the text of each token and 2 · base right + new right."""
    names = {name: index for index, name in enumerate(sorted({sample_id for sample_id, _, _ in texts.keys}))}
    sample = np.array([names[sample_id] for sample_id, _, _ in texts.keys], np.int64)[text]
    compared = np.bincount(sample, minlength=len(names))
    base_hits, new_hits = (np.bincount(sample, right, len(names)) for right in (cell >> 1, cell & 1))
    ratios = Ratios(np.array([0]), np.array([1]), np.array([0]))
    base_sums, new_sums = (np.stack([hits, compared], axis=1) for hits in (base_hits, new_hits))
    return paired_difference(base_sums, new_sums, ratios)[0]


def _flips(texts: _CommonTexts, text: np.ndarray, place: np.ndarray, cell: np.ndarray) -> tuple[Flip, ...]:
    flips = []
    for at in np.flatnonzero((cell == 1) | (cell == 2))[:NUM_LISTED]:
        sample_id, turn, repeat = texts.keys[text[at]]
        flips.append(Flip(sample_id, turn, repeat, int(place[at] - texts.start[text[at]]), bool(cell[at] == 1)))
    return tuple(flips)
