"""Same-token check: outcomes one to one, against a slow join; equal drafters agree whatever k is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specbench.reports.decomposition import decompose
from specbench.reports.decomposition_section import decomposition_sentence
from specbench.reports.drafted_run import DraftedRun
from specbench.reports.same_token import Flip, SameToken, same_token_check
from specbench.reports.same_token_section import same_token_section, same_token_sentence
from specbench.reports.statistics import mcnemar
from specbench.reports.step_columns import step_columns
from specbench.reports.table import section_markdown
from specbench.run_directory import EventLog
from tests.reports.event_logs import make_request, make_sample, make_step
from tests.reports.simulated_runs import draft_hits, drafted_run


def counts(check: SameToken) -> tuple[int, int, int, int]:
    return check.both, check.only_base, check.only_new, check.neither


def run_of(steps: list[tuple[int, int, int]], ids: list[int], label: str, **changes: object) -> DraftedRun:
    """One request whose steps are (output_index, drafted, accepted)."""
    log = EventLog([make_request("r", sample_id="s")])
    log.verify_steps = [
        make_step("r", step, drafted, accepted, output_index=at) for step, (at, drafted, accepted) in enumerate(steps)
    ]
    sample = make_sample("s", None, output_token_ids=ids, **changes)
    return DraftedRun(label, 2, step_columns(log.requests, log.verify_steps), [sample])


def slow_check(base: DraftedRun, new: DraftedRun) -> tuple[int, int, int, int]:
    """The definition again, one step at a time."""

    def outcomes(run: DraftedRun) -> dict[tuple, bool]:
        columns = run.columns
        found = {}
        for row in np.flatnonzero(columns.num_drafted > 0):
            request = columns.requests[columns.request[row]]
            key = (request.sample_id, request.turn, request.repeat, int(columns.output_index[row]))
            found[key] = bool(columns.num_accepted[row] > 0)
        return found

    texts = [{(s.sample_id, s.turn, s.repeat): s.output_token_ids for s in run.samples} for run in (base, new)]
    pairs = [0, 0, 0, 0]
    others = outcomes(new)
    for key, right in outcomes(base).items():
        first, second = (text.get(key[:3]) for text in texts)
        if key in others and first and second and first[: key[3] + 1] == second[: key[3] + 1] and len(first) > key[3]:
            pairs[[(True, True), (True, False), (False, True), (False, False)].index((right, others[key]))] += 1
    return tuple(pairs)


def test_by_hand():
    ids = [5, 6, 7, 8, 9, 1]
    base = run_of([(1, 1, 1), (3, 1, 0), (4, 1, 0), (5, 1, 1)], ids, "base")
    new = run_of([(1, 2, 0), (2, 2, 0), (3, 2, 0), (4, 2, 1)], ids, "new")
    check = same_token_check(base, new)
    # Both begin at tokens 1 (right in base alone), 3 (wrong in both) and 4 (right in new alone).
    assert counts(check) == (0, 1, 1, 1)
    assert (check.base_drafts, check.new_drafts, check.num_common_tokens) == (4, 4, 6)
    assert check.flips == (Flip("s", 0, 0, 1, False), Flip("s", 0, 0, 4, True))
    assert (check.p_value, check.difference.difference) == (1.0, 0.0)
    assert not check.agrees_at_all


def test_only_tokens_before_the_first_difference_count():
    base = run_of([(1, 1, 1), (3, 1, 1), (5, 1, 1)], [5, 6, 7, 8, 9, 1], "base")
    new = run_of([(1, 2, 1), (3, 2, 0), (4, 2, 0), (5, 2, 0)], [5, 6, 7, 4, 9, 1], "new")
    check = same_token_check(base, new)
    assert counts(check) == (1, 0, 0, 0)
    assert (check.num_texts, check.num_identical_texts, check.num_common_tokens) == (1, 0, 3)


def test_steps_without_drafts_are_no_outcome():
    base = run_of([(1, 0, 0), (2, 1, 1)], [5, 6, 7, 8], "base")
    new = run_of([(1, 2, 0), (2, 2, 1)], [5, 6, 7, 8], "new")
    check = same_token_check(base, new)
    assert counts(check) == (1, 0, 0, 0)
    assert (check.base_drafts, check.new_drafts) == (1, 2)


def test_other_prompts_and_turns_behind_other_texts_are_left_out():
    steps, ids = [(1, 1, 1)], [5, 6, 7]
    other_prompt = same_token_check(run_of(steps, ids, "a"), run_of(steps, ids, "b", prompt="another"))
    assert (other_prompt.num_texts, other_prompt.num_left_out, other_prompt.compared) == (0, 1, 0)
    assert same_token_sentence(other_prompt).startswith(
        "No text of both runs to compare at the same tokens; 1 left out"
    )
    first, second = (
        replace(run_of(steps, ids, label), samples=[make_sample("s", None, output_token_ids=first_turn),
                make_sample("s", None, turn=1, output_token_ids=ids)])
        for label, first_turn in (("a", [5, 6, 7]), ("b", [5, 6, 8]))
    )  # fmt: skip
    check = same_token_check(first, second)
    assert (check.num_texts, check.num_left_out) == (1, 1)
    assert counts(check) == (1, 0, 0, 0)


def test_texts_without_token_ids_are_left_out():
    check = same_token_check(run_of([(1, 1, 1)], [], "a"), run_of([(1, 1, 1)], [5, 6], "b"))
    assert (check.num_texts, check.num_left_out) == (0, 1)


@pytest.mark.parametrize("seed", range(4))
def test_fast_join_is_the_slow_one(seed):
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, 50, (12, 40))
    changed = np.where(rng.random((12, 40)) < 0.02, 99, texts)
    base = drafted_run("base", draft_hits(12, 40, 1, rng), num_repeats=2, texts=texts)
    new = drafted_run("new", draft_hits(12, 40, 4, rng), num_repeats=2, texts=changed)
    shuffled = replace(new, samples=new.samples[::-1][:-1])
    check = same_token_check(base, shuffled)
    assert counts(check) == slow_check(base, shuffled)
    assert check.compared > 0 and check.only_base > 0 and check.only_new > 0
    assert check.p_value == mcnemar(check.only_base, check.only_new)
    shares = [(check.both + alone) / check.compared for alone in (check.only_base, check.only_new)]
    assert check.difference.difference == pytest.approx(shares[1] - shares[0])


@pytest.fixture(scope="module")
def equal_drafters() -> tuple[DraftedRun, DraftedRun]:
    hits = draft_hits(120, 150, 8, np.random.default_rng(2))
    return drafted_run("k1", hits[:, :, :1]), drafted_run("k8", hits)


def test_equal_drafters_agree_at_all_though_their_averages_differ(equal_drafters):
    base, new = equal_drafters
    check = same_token_check(base, new)
    assert check.agrees_at_all and check.compared > 1_000
    assert check.difference.interval == (0.0, 0.0) and check.p_value == 1.0
    sentence = same_token_sentence(check)
    assert "their first drafts agree at all of them" in sentence
    apart = decompose(base, new)
    assert apart.total.is_visible and apart.total.difference.difference < 0
    for text in (sentence, decomposition_sentence(apart)):
        assert "better" not in text and "worse" not in text


def test_a_worse_module_is_seen_at_the_same_tokens():
    rng = np.random.default_rng(3)
    hits = draft_hits(60, 80, 8, rng)
    broken = hits & (rng.random(hits.shape) < 0.9)
    check = same_token_check(drafted_run("k1", hits[:, :, :1]), drafted_run("k8", broken))
    assert check.only_new == 0 and check.only_base > 20
    assert check.p_value < 1e-4 and check.difference.is_visible
    text = section_markdown(same_token_section(check))
    assert "At the same tokens k8's first draft is right less often" in text
    assert "more are not listed" in text


def test_chance_flips_are_no_visible_difference():
    rng = np.random.default_rng(4)
    hits = draft_hits(60, 80, 1, rng)
    noisy = [hits ^ (rng.random(hits.shape) < 0.01) for _ in range(2)]
    check = same_token_check(*(drafted_run(label, one) for label, one in zip("ab", noisy, strict=True)))
    assert check.only_base > 0 and check.only_new > 0
    assert "no difference visible" in same_token_sentence(check)


def test_nothing_to_compare():
    check = same_token_check(run_of([], [5], "a"), run_of([], [5], "b"))
    assert same_token_sentence(check).endswith("so nothing is compared.")
    empty = same_token_check(DraftedRun("a", 1, step_columns([], [])), DraftedRun("b", 8, step_columns([], [])))
    assert same_token_sentence(empty) == "No text of both runs to compare at the same tokens."
    assert empty.p_value is None
