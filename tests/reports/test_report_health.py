"""Health checks: for each a log that must raise it, a near miss that must not, and what it can't check."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from specbench.records import DataIdentity, ModelIdentity, OutputCheck, RunRecord, SampleRecord
from specbench.reports.clusters import MIN_SAMPLES, Moments, SampleRatio, combination, slope
from specbench.reports.diagnosis import CHECKS
from specbench.reports.health_section import health_section, health_sentence
from specbench.reports.known_acceptance import (
    NANO_AUDIO,
    NANO_CHECKPOINT,
    NANO_PROBLEMS,
    KnownAcceptance,
    known_acceptance,
)
from specbench.reports.metrics import compute_metrics
from specbench.reports.table import section_markdown
from specbench.reports.token_table import pack_tokens
from specbench.run_directory import EventLog
from tests.reports.event_logs import log_of_accepted, make_request, make_run, make_sample, make_step, simulate

HEALTHY = [0.8, 0.8, 0.82, 0.84]
DRAFTING = (
    "near_zero",
    "deeper_positions",
    "first_module_only",
    "after_full_acceptance",
    "context_length",
    "prompt_length",
    "requests_alike",
)


def checked(log: EventLog, run: RunRecord | None = None, k: int = 4) -> dict[str, dict]:
    run = make_run(k) if run is None else run
    return {check["name"]: check for check in compute_metrics(run, log)["health"]}


def status(log: EventLog, name: str, run: RunRecord | None = None, k: int = 4) -> str:
    return checked(log, run, k)[name]["status"]


Rates = Callable[[int, int, int], Sequence[float]]


def drafted(rates: Sequence[float] | Rates, num_requests: int = 40, num_steps: int = 30, seed: int = 0) -> EventLog:
    """Each draft goes on by rates[i] given the previous position, or by rates(request, step, previous)."""
    rng = random.Random(seed)
    rows = []
    for request in range(num_requests):
        row: list[int] = []
        for step in range(num_steps):
            now = rates(request, step, row[-1] if row else -1) if callable(rates) else rates
            row.append(next((i for i, rate in enumerate(now) if rng.random() >= rate), len(now)))
        rows.append(tuple(row))
    log = log_of_accepted(rows, 4 if callable(rates) else len(rates))
    return EventLog(log.requests, [replace(step, output_index=1 + 4 * step.step) for step in log.verify_steps])


def with_requests(log: EventLog, change: Callable[[int], dict]) -> EventLog:
    requests = [replace(request, **change(index)) for index, request in enumerate(log.requests)]
    return EventLog(requests, log.verify_steps, log.engine_steps, log.samples)


def test_a_healthy_log_raises_nothing():
    for seed in range(3):
        health = checked(with_requests(drafted(HEALTHY, 120, seed=seed), lambda i: {"num_prompt_tokens": 64 + 8 * i}))
        assert {health[name]["status"] for name in DRAFTING} == {"ok"}
        assert [one["name"] for one in health.values() if one["status"] in ("warning", "failed")] == []


def test_every_check_says_what_why_and_where():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in checked(drafted(HEALTHY)).values():
        assert all(check[part] for part in ("title", "status", "seen", "threshold", "why", "where"))


def test_nothing_is_ticked_that_was_not_checked():
    """A few steps, a few samples, no drafts, no requests: drafting is not checked, each time with a reason."""
    few_samples = drafted(HEALTHY, MIN_SAMPLES - 1)
    few_steps = log_of_accepted([(1,)] * (MIN_SAMPLES - 1), 4)
    for log, k in ((few_samples, 4), (few_steps, 4), (EventLog(), 4), (log_of_accepted([(0,)] * 50, 0), None)):
        run = make_run(k, method="none" if k is None else "mtp")
        health = checked(log, run)
        assert {health[name]["status"] for name in DRAFTING} == {"not_checked"}
        assert all(health[name]["seen"] for name in DRAFTING)
    assert {one["status"] for one in checked(EventLog()).values()} == {"not_checked"}


def test_drafts_whose_counts_contradict_each_other_are_not_judged():
    log = drafted(HEALTHY)
    broken = EventLog(log.requests, [replace(step, num_accepted=9) for step in log.verify_steps])
    health = checked(broken)
    assert health["identities"]["status"] == "failed"
    assert {health[name]["status"] for name in DRAFTING} == {"not_checked"}


# ---- The measuring


def test_identities():
    log = simulate(1)
    assert status(log, "identities") == "ok"
    broken = EventLog(
        log.requests, [replace(log.verify_steps[-1], num_accepted=3, num_drafted=2), *log.verify_steps[:-1]]
    )
    assert status(broken, "identities") == "failed"


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (OutputCheck("identical", 32, 32), "ok"),
        (OutputCheck("near_ties", 32, 31, 1), "ok"),
        (OutputCheck("mismatch", 32, 31, 0, 1), "failed"),
        (OutputCheck("not_checked", reason="report.output_check_requests=0"), "not_checked"),
        (OutputCheck("not_applicable", reason="sampled at temperature 1"), "not_checked"),
        (None, "not_checked"),
    ],
)
def test_output_check(check, expected):
    health = checked(simulate(1), make_run(4, output_check=check))["output_check"]
    assert health["status"] == expected
    if check is not None and check.reason:
        assert health["seen"] == check.reason


@pytest.mark.parametrize(("emitted", "expected"), [(6, "warning"), (5, "ok")])
def test_merged_chunks_of_a_server(emitted, expected):
    log = EventLog([make_request("r", num_output_tokens=1 + emitted)], [make_step("r", 0, 4, emitted - 1)])
    assert status(log, "merged_chunks", make_run(4, acceptance_source="chunks")) == expected
    assert status(log, "merged_chunks") == "not_checked"  # the engine has no chunks
    assert status(EventLog(log.requests), "merged_chunks", make_run(4, acceptance_source="chunks")) == "not_checked"


@pytest.mark.parametrize(("num_requests", "expected"), [(99, "warning"), (100, "ok"), (0, "not_checked")])
def test_requests_of_a_p99(num_requests, expected):
    assert status(log_of_accepted([(1,)] * num_requests, 4), "p99_requests") == expected


# ---- The text


def test_a_warm_up_that_failed():
    log = simulate(5)
    assert status(log, "warmup") == "ok"
    place = next(index for index, request in enumerate(log.requests) if request.is_warmup)
    log.requests[place] = replace(log.requests[place], finish_reason="error", error="no room")
    found = checked(log)["warmup"]
    assert (found["status"], found["seen"]) == ("warning", "1 request of the warm-up failed")


def looping(num_loops: int, num_requests: int = 100) -> EventLog:
    """Loops accept every draft; other texts never say eight tokens twice."""
    log = drafted(lambda request, *_: [1.0] * 4 if request < num_loops else HEALTHY, num_requests)
    log.samples = [
        make_sample(f"r{index}", 1.0, output_token_ids=[5, 6, 7] * 20 if index < num_loops else list(range(60)))
        for index in range(num_requests)
    ]
    return log


@pytest.mark.parametrize(("num_loops", "expected"), [(0, "ok"), (1, "ok"), (20, "warning"), (100, "warning")])
def test_repetition_with_high_acceptance(num_loops, expected):
    assert status(looping(num_loops), "repetition") == expected


def test_repetition_that_does_not_lift_acceptance_is_none():
    log = drafted(HEALTHY, 100)
    log.samples = looping(50).samples
    assert status(log, "repetition") == "ok"
    log.samples = []
    assert status(log, "repetition") == "not_checked"


def test_a_few_loops_among_very_many_texts_are_no_alarm():
    """Beyond chance, but they lift acceptance length by less than a percent."""
    log = log_of_accepted([(4,) * 6] * 20 + [(2,) * 6] * 2000, 4)
    log.samples = [
        make_sample(f"r{index}", 1.0, output_token_ids=[5] * 40 if index < 20 else list(range(40)))
        for index in range(2020)
    ]
    found = checked(log)["repetition"]
    lift = found["numbers"]["acceptance_length"] / found["numbers"]["without_loops"] - 1
    assert found["numbers"]["loops"] == 20
    assert 0.005 < lift < 0.01
    assert found["status"] == "ok"


def test_short_outputs_are_not_judged():
    log = drafted(HEALTHY, 100)
    log.samples = [make_sample(f"r{index}", 1.0, output_token_ids=[1] * 31) for index in range(100)]
    assert status(log, "repetition") == "not_checked"


def sampling(**changes: object) -> RunRecord:
    run = make_run(4)
    run.config["sampling"] = {"ignore_eos": False, "temperature": 0.0} | changes
    return run


def test_ignore_eos_random_data_and_synthetic_acceptance():
    log = drafted(HEALTHY)
    assert status(log, "real_text", sampling()) == "ok"
    assert status(log, "real_text", sampling(ignore_eos=True)) == "warning"
    unknown = make_run(4)
    del unknown.config["sampling"]
    assert status(log, "real_text", unknown) == "not_checked"
    random_data = sampling()
    random_data.data = DataIdentity("random", None, None, None, False)
    assert status(log, "real_text", random_data) == "warning"
    imported = sampling(ignore_eos=None)
    imported.data, imported.acceptance_source = random_data.data, "vllm bench serve"
    imported.reported_metrics = {"acceptance": {"drafts": 1000}}
    assert status(EventLog(log.requests), "real_text", imported) == "warning"
    imported.data = GSM8K
    assert status(EventLog(log.requests), "real_text", imported) == "not_checked"  # it does not say whether texts ended
    synthetic = sampling()
    synthetic.config["spec"]["rejection_sample_method"] = "synthetic"
    assert status(log, "real_text", synthetic) == "warning"
    drawn = sampling()
    drawn.config["model"] = {"load": "random"}
    assert status(log, "real_text", drawn) == "warning"
    assert status(log_of_accepted([(0,)] * 30, 0), "real_text", make_run(None, method="none")) == "not_checked"


@pytest.mark.parametrize(("vocabulary", "expected"), [(50_000, "warning"), (200, "ok")])
def test_prompts_of_random_ids(vocabulary, expected):
    rng = random.Random(0)
    log = drafted(HEALTHY)
    log.samples = [
        make_sample(f"r{index}", 1.0, prompt_token_ids=[rng.randrange(vocabulary) for _ in range(128)])
        for index in range(40)
    ]
    assert status(log, "real_text", sampling()) == expected


# ---- The drafter


def test_acceptance_near_zero():
    samples = [make_sample(f"r{index}", 1.0, output_token_ids=[7] * 5 + list(range(95))) for index in range(40)]
    for rate, expected in ((0.01, "failed"), (0.07, "warning"), (0.2, "ok")):
        log = drafted([rate, 0.8, 0.8, 0.8])
        log.samples = samples  # the commonest token is 6 % of them
        assert status(log, "near_zero") == expected, rate


def known_run(data: DataIdentity, model: ModelIdentity, **eval_changes: object) -> RunRecord:
    run = make_run(8, model=model, data=data)
    run.config["eval"] |= {"num_fewshot": 0, "protocol": "chat", "instruction": "auto"} | eval_changes
    return run


NANO = ModelIdentity("inkling", "inkling-nano", "/m", None, NANO_CHECKPOINT, True, 5_800_000, 8)
PROBLEMS = DataIdentity("nano_problems", "/d", None, NANO_PROBLEMS, True, 60)
INKLING = ModelIdentity("inkling", "Inkling-NVFP4", "/m", None, "a1", False, None, 8)
GSM8K = DataIdentity("gsm8k", "/d", None, "b2", False, 60)


def as_known(known: KnownAcceptance, factor: float) -> EventLog:
    """Drafts whose conditional rates are `factor` of those known."""
    return drafted([factor * known.given_the_previous(position) for position in range(known.k)], 60, 40)


@pytest.mark.parametrize(("factor", "expected"), [(1.0, "ok"), (0.93, "warning")])
def test_acceptance_known_of_the_same_texts(factor, expected):
    run = known_run(PROBLEMS, NANO)
    known = known_acceptance(run, 8)
    assert known.is_same_text
    assert status(as_known(known, factor), "known_acceptance", run) == expected


@pytest.mark.parametrize(("factor", "expected"), [(0.95, "ok"), (0.75, "warning")])
def test_published_acceptance_leaves_room_for_another_prompt(factor, expected):
    run = known_run(GSM8K, INKLING)
    known = known_acceptance(run, 8)
    assert sum(known.accepted_at_position) == pytest.approx(356_839, rel=1e-4)  # the published count
    assert status(as_known(known, factor), "known_acceptance", run) == expected


def test_nothing_is_known_of_other_weights_data_prompts_or_sampling():
    log = drafted(HEALTHY)
    assert status(log, "known_acceptance") == "not_checked"
    for run in (
        known_run(PROBLEMS, replace(NANO, sha256="retrained")),
        known_run(replace(PROBLEMS, sha256="others"), NANO),
        known_run(PROBLEMS, NANO, num_fewshot=5),
    ):
        assert known_acceptance(run, 8) is None
    warm = known_run(PROBLEMS, NANO)
    warm.config["sampling"]["temperature"] = 1.0
    assert known_acceptance(warm, 8) is None
    assert known_acceptance(known_run(PROBLEMS, NANO), 9) is None
    single = known_run(PROBLEMS, NANO)
    single.config["spec"]["modules"] = "single"
    assert known_acceptance(single, 8) is None


def test_acceptance_on_listening_questions_is_known_in_the_prompt_it_was_measured_with():
    clips = DataIdentity(NANO_AUDIO, "/d", None, "c3", True, 60)
    known = known_acceptance(known_run(clips, NANO, prompt="official", instruction=None), 8)
    assert known.is_same_text and known.data == NANO_AUDIO
    assert known_acceptance(known_run(clips, NANO, prompt="letters", instruction=None), 8) is None


def test_the_packaged_model_and_problems_are_those_that_figures_are_known_of():
    from specbench.engine.checkpoints.checkpoint import Checkpoint
    from specbench.evals import gsm8k, mmau
    from specbench.model_choice import PACKAGED_CHECKPOINT

    assert Checkpoint.open(PACKAGED_CHECKPOINT).sha256() == NANO_CHECKPOINT
    assert sha256((gsm8k.PACKAGED_PROBLEMS / "test.jsonl").read_bytes()).hexdigest() == NANO_PROBLEMS
    assert mmau.PACKAGED_NAME == NANO_AUDIO


def test_deeper_positions_collapse():
    assert status(drafted([0.9, 0.9, 0.5, 0.9]), "deeper_positions") == "warning"
    assert status(drafted([0.9, 0.9, 0.72, 0.9]), "deeper_positions") == "ok"
    collapsed = checked(drafted([0.9, 0.9, 0.5, 0.9]))["deeper_positions"]
    assert collapsed["numbers"]["position"] == 2
    assert collapsed["numbers"]["rate"] == pytest.approx(0.5, abs=0.05)
    assert status(log_of_accepted([(1,) * 9] * 40, 1), "deeper_positions", k=1) == "not_checked"


def test_a_collapse_shows_in_chains_that_never_broke_alone():
    """After full acceptance a deep module reads a wrong row; elsewhere it is fine."""

    def rates(request: int, step: int, previous: int) -> list[float]:
        return [0.95, 0.9, 0.9, 0.5] if previous == 4 else [0.8, 0.85, 0.9, 0.95]

    found = checked(drafted(rates, 100))["deeper_positions"]
    assert found["status"] == "warning"
    assert "never broke" in found["seen"]


def test_a_weak_deep_position_reached_by_few_is_not_judged():
    log = log_of_accepted([(1, 0)] * 39 + [(2, 2)], 4)
    assert "position 1" in checked(log)["deeper_positions"]["seen"]


def test_first_module_at_every_depth():
    copied = [0.9, 0.1, 0.08, 0.1]
    assert status(drafted(copied, num_steps=60), "first_module_only") == "warning"
    assert status(drafted([0.9, 0.1, 0.9, 0.9], 200, 60), "first_module_only") == "ok"  # depth 2 works: no copy
    assert status(drafted([0.9, 0.42, 0.4, 0.4]), "first_module_only") == "ok"  # no cliff beyond chance
    assert status(drafted([0.02, 0.1, 0.1, 0.1], 20, 10), "first_module_only") == "not_checked"
    single = make_run(4)
    single.config["spec"]["modules"] = "single"
    assert status(drafted(copied, num_steps=60), "first_module_only", single) == "not_checked"  # as it was asked


def test_position_0_after_full_acceptance():
    def rates(low: float) -> Rates:
        return lambda request, step, previous: [low if previous == 4 else 0.9, 0.9, 0.9, 0.9]

    assert status(drafted(rates(0.6)), "after_full_acceptance") == "warning"
    assert status(drafted(rates(0.84)), "after_full_acceptance") == "ok"
    assert status(drafted([0.9, 0.9, 0.1, 0.1], 20, 5), "after_full_acceptance") == "not_checked"


def test_acceptance_falls_as_a_request_grows():
    def rates(loss: float) -> Rates:
        return lambda request, step, previous: [max(0.9 - loss * step, 0.1)] * 4

    assert status(drafted(rates(0.02)), "context_length") == "warning"
    assert status(drafted(rates(0.0)), "context_length") == "ok"
    assert status(drafted(HEALTHY, num_steps=1), "context_length") == "not_checked"


def test_what_lies_behind_a_stop_is_no_loss():
    """The last step of each request drafts behind its end, and accepts nothing."""
    log = drafted(lambda request, step, _: [0.0] * 4 if step == 5 else HEALTHY, 120, 6)
    assert status(log, "context_length") == "ok"


def test_long_requests_of_a_harder_kind_do_not_look_like_a_long_context():
    """Hard requests run longer, but none of them gets worse as it grows."""
    easy, hard = drafted([0.9] * 4, 40, 10), drafted([0.3] * 4, 40, 60, seed=1)
    hard = EventLog(
        [replace(one, request_id="h" + one.request_id, sample_id="h" + one.sample_id) for one in hard.requests],
        [replace(one, request_id="h" + one.request_id) for one in hard.verify_steps],
    )
    both = EventLog(easy.requests + hard.requests, easy.verify_steps + hard.verify_steps)
    assert status(both, "context_length") == "ok"


def test_acceptance_falls_with_prompt_length():
    def prompts(index: int) -> dict:
        return {"num_prompt_tokens": 64 * 2 ** (index % 6)}

    falling = with_requests(drafted(lambda request, *_: [0.9 - 0.1 * (request % 6)] * 4, 120), prompts)
    assert status(falling, "prompt_length") == "warning"
    assert status(with_requests(drafted(HEALTHY, 120), prompts), "prompt_length") == "ok"
    # Two categories, the long one harder, neither falling within itself.
    kinds = drafted(lambda request, *_: [0.9 if request % 2 else 0.5] * 4, 120)
    mixed = with_requests(
        kinds,
        lambda i: {
            "num_prompt_tokens": (100 if i % 2 else 3000) * (1 + i % 3),
            "category": "short" if i % 2 else "long",
        },
    )
    assert status(mixed, "prompt_length") == "ok"
    assert status(with_requests(kinds, lambda i: {"num_prompt_tokens": 100}), "prompt_length") == "not_checked"


def test_a_trend_that_could_not_be_seen_is_not_ticked():
    narrow = with_requests(drafted(HEALTHY, 40, 5), lambda i: {"num_prompt_tokens": 1000 + i})
    found = checked(narrow)["prompt_length"]
    assert found["status"] == "not_checked"
    assert "too little variation" in found["seen"]


def test_acceptance_falls_with_the_cached_fraction():
    def cached(index: int) -> dict:
        return {"num_prompt_tokens": 100, "num_cached_prompt_tokens": 96 if index % 2 else 0}

    stale = drafted(lambda request, *_: [0.6 if request % 2 else 0.85] * 4, 120)
    assert status(with_requests(stale, cached), "cached_fraction") == "warning"
    assert status(with_requests(drafted(HEALTHY, 120), cached), "cached_fraction") == "ok"
    assert status(stale, "cached_fraction") == "not_checked"  # nothing was cached
    unasked = checked(with_requests(stale, lambda i: {"num_cached_prompt_tokens": None}))["cached_fraction"]
    assert (unasked["status"], unasked["seen"]) == ("not_checked", "no prefix cache was asked")
    one_cold = with_requests(stale, lambda i: cached(1) if i else {})
    assert "each side needs" in checked(one_cold)["cached_fraction"]["seen"]


def test_requests_that_differ_by_more_than_chance():
    dead_fifth = drafted(lambda request, *_: [0.02] * 4 if request % 5 == 0 else HEALTHY, 100)
    found = checked(dead_fifth)["requests_alike"]
    assert found["status"] == "warning"
    assert all(int(name.split(" ")[0][1:]) % 5 == 0 for name in found["seen"].split("lowest: ")[1].split(", "))
    uneven = drafted(lambda request, *_: [0.75 + 0.01 * (request % 10)] * 4, 100)
    assert status(uneven, "requests_alike") == "ok"
    named = with_requests(dead_fifth, lambda i: {"category": "hard" if i % 5 == 0 else "easy"})
    assert status(named, "requests_alike") == "ok"  # the categories say it


def test_requests_that_differ_for_certain_but_little_are_no_alarm():
    uneven = drafted(lambda request, *_: [0.7 + 0.015 * (request % 10)] * 4, 100, 200)
    found = checked(uneven)["requests_alike"]
    assert found["numbers"]["p_value"] < 1e-6
    assert 0.1 < found["numbers"]["relative_spread"] < 1 / 3
    assert found["status"] == "ok"


def test_requests_of_few_drafts_differ_by_chance():
    found = [checked(drafted([0.3] * 4, 24, 3, seed))["requests_alike"] for seed in range(12)]
    assert {one["status"] for one in found} == {"ok"}
    assert max(one["numbers"]["relative_spread"] for one in found) > 1 / 3  # without the p value some would be raised


def test_drift_within_requests_is_not_a_difference_between_them():
    drifting = drafted(lambda request, step, _: [0.95 if (step // 5 + request) % 2 else 0.4] * 4, 100)
    assert status(drifting, "requests_alike") == "ok"


# ---- What the checks stand on


def test_standard_error_of_a_ratio_by_hand():
    ratio = SampleRatio(np.array([1, 3, 0]), np.array([2, 4, 0]))
    # value 4/6; influences (1 - 4/3)/6 = -1/18 and (3 - 8/3)/6 = 1/18, of two samples that count
    estimate = combination([(1.0, ratio)])
    assert estimate.value == pytest.approx(2 / 3)
    assert estimate.standard_error == pytest.approx((2 * (1 / 18) ** 2 * 2) ** 0.5)


def test_standard_errors_cover_simulated_ratios_and_slopes():
    """Steps of one sample share a shift: errors by sample cover the truth, in about 95 % of trials."""
    rng = np.random.default_rng(0)
    hits = np.zeros(2)
    for _ in range(300):
        sample = np.repeat(np.arange(60), rng.integers(5, 20, 60))
        x = rng.normal(size=len(sample))
        y = 1.0 + 0.5 * x + rng.normal(size=60)[sample] + rng.normal(size=len(sample))
        mean = SampleRatio(np.bincount(sample, weights=y), np.bincount(sample)).estimate()
        start = np.flatnonzero(np.append(True, sample[1:] != sample[:-1]))
        trend = slope(Moments.of_runs(x, y, start), np.zeros(60, np.int64), np.arange(60))
        hits += [abs(mean.standard_errors_from(1.0)) < 1.96, abs(trend.standard_errors_from(0.5)) < 1.96]
    assert (hits / 300 > 0.9).all()
    assert (hits / 300 < 0.985).all()


def test_slope_by_hand():
    # Two groups with means of their own; within each, y rises by 2 for each x.
    x, y = np.array([0.0, 1.0, 5.0, 7.0]), np.array([10.0, 12.0, 1.0, 5.0])
    start, group = np.array([0, 2]), np.array([0, 1])
    assert slope(Moments.of_runs(x, y, start), group, group).value == pytest.approx(2.0)
    assert slope(Moments.of_runs(np.array([3.0, 3.0, 7.0, 7.0]), y, start), group, group) is None
    # Three units with one x each, in one group: y of 1, 2 and 6 a row, weighted by 1, 1 and 2 rows.
    units = Moments.of_units(np.array([0.0, 1.0, 3.0]), np.array([1.0, 2.0, 12.0]), np.array([1, 1, 2]))
    expected = np.polyfit([0, 1, 3, 3], [1, 2, 6, 6], 1)[0]
    assert slope(units, np.zeros(3, np.int64), np.arange(3)).value == pytest.approx(expected)


def test_repeated_ngrams_against_a_slow_count():
    rng = random.Random(0)
    texts = [[rng.randrange(4) for _ in range(rng.randrange(40))] for _ in range(30)]
    table = pack_tokens(texts)
    shares = table.repeated_ngram_share(4)
    for text, share, distinct in zip(texts, shares, table.distinct_share, strict=True):
        grams = [tuple(text[i : i + 4]) for i in range(len(text) - 3)]
        assert share == pytest.approx(1 - len(set(grams)) / len(grams)) if grams else np.isnan(share)
        assert distinct == pytest.approx(len(set(text)) / len(text)) if text else np.isnan(distinct)


def test_a_large_run_is_packed_in_part_and_evenly():
    table = pack_tokens([[index] * 10 for index in range(100)], limit=250)
    assert table.index.tolist() == list(range(0, 100, 4))
    assert table.token_ids[::10].tolist() == table.index.tolist()


# ---- Text


def test_section_names_status_and_advice():
    health = list(checked(drafted([0.9, 0.1, 0.1, 0.1], num_steps=60)).values())
    text = section_markdown(health_section(health))
    assert text.startswith("## Health\n")
    assert "| Deeper modules are not copies of the first | **warning** |" in " ".join(text.split())
    assert "Where to look: the step index" in text
    sentence = health_sentence(health)
    assert "**warning**: p99_requests, deeper_positions, first_module_only" in sentence
    assert sentence.endswith("not checked")


def test_samples_without_a_request_do_no_harm():
    log = looping(3)
    log.samples.append(SampleRecord("gone", 0, 0, None, None, "", "", [1] * 64, None, {}, {}, False))
    assert status(log, "repetition") == "ok"
