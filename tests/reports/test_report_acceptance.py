"""Acceptance figures: published tables come out of their counts, and a slow second implementation agrees."""

from __future__ import annotations

from collections import defaultdict

import pytest

from specbench.reports.acceptance import acceptance_metrics
from specbench.reports.acceptance_sections import acceptance_sections, previous_rows
from specbench.reports.metrics import compute_metrics
from specbench.reports.number_format import decimal, percent
from specbench.reports.step_columns import step_columns
from specbench.reports.table import section_markdown
from specbench.run_directory import EventLog
from tests.reports.event_logs import log_of_accepted, make_request, make_run, make_step, simulate


def measure(log: EventLog, k: int | None) -> dict:
    return acceptance_metrics(step_columns(log.requests, log.verify_steps), k)


def accepted_counts(drafts: int, accepted_tokens: int, percentages: list[float]) -> list[int]:
    """num_accepted of `drafts` steps whose positions print as `percentages` and whose sum is `accepted_tokens`."""
    at_position = [round(drafts * percentage / 100) for percentage in percentages]
    unit = 1 if accepted_tokens > sum(at_position) else -1
    for index, percentage in enumerate(percentages):
        while sum(at_position) != accepted_tokens:
            if percent((at_position[index] + unit) / drafts) != f"{percentage:.2f}%":
                break
            at_position[index] += unit
    edges = [drafts, *at_position, 0]
    return [accepted for accepted in range(len(edges) - 1) for _ in range(edges[accepted] - edges[accepted + 1])]


GSM8K_MTP8 = [75.68, 60.11, 49.76, 41.13, 35.38, 29.80, 26.08, 22.29]
DEBUG_MTP8 = [76.17, 61.58, 51.25, 42.43, 36.40, 30.94, 27.22, 23.65]
BLOCK_MTP8 = [70.31, 52.24, 40.23, 32.25, 26.45, 22.03, 18.72, 16.09]


@pytest.mark.parametrize(
    ("draft_tokens", "accepted_tokens", "rate", "length", "percentages"),
    [
        (839_040, 356_839, "42.53%", "4.40", GSM8K_MTP8),
        (246_348, 205_916, "83.59%", "1.84", [83.59]),
        (88_344, 38_611, "43.71%", "4.50", DEBUG_MTP8),
        (26_407, 22_021, "83.39%", "1.83", [83.39]),
        (1_109_600, 386_019, "34.79%", "3.78", BLOCK_MTP8),
    ],
)
def test_published_tables_come_out_of_their_counts(draft_tokens, accepted_tokens, rate, length, percentages):
    k = len(percentages)
    drafts = draft_tokens // k
    acceptance = measure(log_of_accepted([tuple(accepted_counts(drafts, accepted_tokens, percentages))], k), k)
    assert (acceptance["drafts"], acceptance["draft_tokens"]) == (drafts, draft_tokens)
    assert acceptance["accepted_tokens"] == accepted_tokens
    assert percent(acceptance["acceptance_rate"]) == rate
    assert decimal(acceptance["acceptance_length"]) == length
    assert [percent(one) for one in acceptance["per_position"]] == [f"{one:.2f}%" for one in percentages]
    assert sum(acceptance["accepted_at_position"]) == accepted_tokens


#: previous accepted -> drafts, position-0 hits, printed percentage
MTP1_BUCKETS = {0: (4214, 2968, "70.43%"), 1: (20673, 17708, "85.66%")}
MTP8_BUCKETS = {
    0: (2418, 1695, "70.10%"),
    1: (1529, 1069, "69.91%"),
    2: (955, 700, "73.30%"),
    3: (846, 585, "69.15%"),
    4: (597, 432, "72.36%"),
    5: (543, 407, "74.95%"),
    6: (368, 263, "71.47%"),
    7: (361, 273, "75.62%"),
    8: (2268, 2046, "90.21%"),
}


def bucket_log(buckets: dict, k: int) -> EventLog:
    """Each draft of the table is the second step of a request of its own, whose first step accepted `previous`."""
    pairs = []
    for previous, (drafts, hits, _) in buckets.items():
        pairs += [(previous, 1)] * hits + [(previous, 0)] * (drafts - hits)
    return log_of_accepted(pairs, k)


@pytest.mark.parametrize(
    ("buckets", "k", "total", "overall"), [(MTP1_BUCKETS, 1, 24_887, "83.08%"), (MTP8_BUCKETS, 8, 9885, "75.57%")]
)
def test_investigation_by_previous_step_comes_out(buckets, k, total, overall):
    acceptance = measure(bucket_log(buckets, k), k)
    by_previous = {bucket["previous"]: bucket for bucket in acceptance["by_previous"]}
    for previous, (drafts, hits, printed) in buckets.items():
        assert by_previous[previous]["drafts"] == drafts
        assert by_previous[previous]["accepted_at_position"][0] == hits
        assert percent(by_previous[previous]["per_position"][0]) == printed
    rows = dict(previous_rows(acceptance))
    with_previous = rows["all with a previous step"]
    assert with_previous["drafts"] == total
    assert percent(with_previous["accepted_at_position"][0] / total) == overall
    assert by_previous[None]["drafts"] == total  # the first step of each request
    assert rows["all"]["drafts"] == 2 * total


def test_buckets_below_k_pool_to_the_published_share():
    rows = dict(previous_rows(measure(bucket_log(MTP8_BUCKETS, 8), 8)))
    together = rows["0 to 7 together"]
    assert (together["accepted_at_position"][0], together["drafts"]) == (5424, 7617)
    assert percent(5424 / 7617) == "71.21%"


def test_conditional_rates_within_the_unbroken_bucket():
    published = [0.902, 0.886, 0.910, 0.904, 0.914, 0.911, 0.924, 0.931]
    edges = [2268]
    for rate in published:
        edges.append(round(edges[-1] * rate))
    edges.append(0)
    current = [accepted for accepted in range(9) for _ in range(edges[accepted] - edges[accepted + 1])]
    acceptance = measure(log_of_accepted([(8, accepted) for accepted in current], 8), 8)
    unbroken = acceptance["by_previous"][-1]
    assert unbroken["previous"] == 8
    assert [round(one, 3) for one in unbroken["per_position_conditional"]] == published
    assert "8 (chain never broke)" in section_markdown(acceptance_sections(acceptance, {})[2])


def test_bucket_labels_and_totals_are_printed_like_the_investigation():
    text = section_markdown(acceptance_sections(measure(bucket_log(MTP1_BUCKETS, 1), 1), {})[2])
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "| 0 (draft rejected) | 4,214 | 70.43% | n/a | 1.70 |" in lines
    assert "| 1 (draft accepted) | 20,673 | 85.66% | n/a | 1.86 |" in lines
    assert "| all with a previous step | 24,887 | 83.08% | n/a | 1.83 |" in lines


def test_first_row_is_null_and_a_row_after_nothing_drafted_is_minus_one():
    log = EventLog([make_request("r", num_output_tokens=8)])
    log.verify_steps = [make_step("r", step, drafted, accepted) for step, drafted, accepted in
                        [(0, 2, 1), (1, 0, 0), (2, 2, 2), (3, 2, 0)]]  # fmt: skip
    drafts = {bucket["previous"]: bucket["drafts"] for bucket in measure(log, 2)["by_previous"]}
    assert drafts == {None: 1, -1: 1, 0: 0, 1: 0, 2: 1}


def test_conditional_rate_leaves_out_steps_that_did_not_draft_so_far():
    log = log_of_accepted([(1,), (1,)], 1)
    log.verify_steps[1] = make_step("r1", 0, 2, 2)
    acceptance = measure(log, 2)
    assert acceptance["per_position"] == [1.0, 0.5]
    assert acceptance["per_position_conditional"] == [1.0, 1.0]  # only one step drafted position 1


def test_length_weighs_steps_and_mean_length_weighs_requests():
    acceptance = measure(log_of_accepted([(2, 2, 2), (0,)], 2), 2)
    assert acceptance["acceptance_length"] == 1 + 6 / 4
    assert acceptance["per_request_mean_length"] == (3 + 1) / 2


def test_autocorrelation_of_an_alternating_request():
    acceptance = measure(log_of_accepted([(0, 2, 0, 2, 0, 2)], 2), 2)
    assert acceptance["autocorrelation"] == pytest.approx([-1, 1, -1, 1, -1, None, None, None])


def test_autocorrelation_without_request_means_is_blind_to_easy_requests():
    acceptance = measure(log_of_accepted([(2,) * 9, (0,) * 9], 2), 2)
    assert acceptance["autocorrelation"] == pytest.approx([1.0] * 8)
    assert acceptance["autocorrelation_within_request"] == [None] * 8


def slow_acceptance(log: EventLog, k: int) -> dict:
    """The definitions again, one row at a time."""
    warmup = {request.request_id for request in log.requests if request.is_warmup}
    rows = defaultdict(list)
    for step in sorted(log.verify_steps, key=lambda step: step.step):
        if step.request_id not in warmup:
            rows[step.request_id].append(step)
    buckets = defaultdict(list)
    for steps in rows.values():
        for before, step in zip([None, *steps], steps, strict=False):
            previous = None if before is None else before.num_accepted if before.num_drafted else -1
            if step.num_drafted:
                buckets[previous].append((step.num_drafted, step.num_accepted))
    everything = [draft for bucket in buckets.values() for draft in bucket]
    lengths = []
    for steps in rows.values():
        drafts = [step.num_accepted for step in steps if step.num_drafted]
        lengths += [1 + sum(drafts) / len(drafts)] if drafts else []
    return {
        "all": slow_rates(everything, k),
        "buckets": {previous: slow_rates(drafts, k) for previous, drafts in buckets.items()},
        "histogram": [sum(accepted == j for _, accepted in everything) for j in range(k + 1)],
        "per_request_mean_length": sum(lengths) / len(lengths),
        "autocorrelation": [slow_autocorrelation(rows, lag, False) for lag in range(1, 9)],
        "autocorrelation_within_request": [slow_autocorrelation(rows, lag, True) for lag in range(1, 9)],
    }


def slow_rates(drafts: list[tuple[int, int]], k: int) -> dict:
    conditional = []
    for position in range(k):
        reached = [accepted for drafted, accepted in drafts if accepted >= position and drafted > position]
        conditional.append(sum(a > position for a in reached) / len(reached) if reached else None)
    return {
        "drafts": len(drafts),
        "acceptance_length": 1 + sum(accepted for _, accepted in drafts) / len(drafts),
        "per_position": [sum(accepted > i for _, accepted in drafts) / len(drafts) for i in range(k)],
        "per_position_conditional": conditional,
    }


def slow_autocorrelation(rows: dict, lag: int, is_within: bool) -> float | None:
    drafts = {name: [s.num_accepted for s in steps if s.num_drafted] for name, steps in rows.items()}
    pooled = [accepted for counts in drafts.values() for accepted in counts]
    products, squares = [], []
    for name, steps in rows.items():
        if not drafts[name]:
            continue
        counts = drafts[name] if is_within else pooled
        mean = sum(counts) / len(counts)
        squares += [(accepted - mean) ** 2 for accepted in drafts[name]]
        products += [
            (a.num_accepted - mean) * (b.num_accepted - mean)
            for a, b in zip(steps, steps[lag:], strict=False)
            if a.num_drafted and b.num_drafted
        ]
    return sum(products) / len(products) / (sum(squares) / len(squares)) if products else None


@pytest.mark.parametrize("seed", range(8))
def test_vectorised_figures_equal_the_slow_ones(seed):
    k = 1 + seed % 5
    log = simulate(seed, k=k, is_ragged=True)
    fast, slow = measure(log, k), slow_acceptance(log, k)
    for name, value in slow["all"].items():
        assert fast[name] == pytest.approx(value)
    assert fast["accepted_histogram"] == slow["histogram"]
    assert fast["per_request_mean_length"] == pytest.approx(slow["per_request_mean_length"])
    for name in ("autocorrelation", "autocorrelation_within_request"):
        assert fast[name] == pytest.approx(slow[name])
    filled = {bucket["previous"]: bucket for bucket in fast["by_previous"] if bucket["drafts"]}
    assert filled.keys() == slow["buckets"].keys()
    for previous, expected in slow["buckets"].items():
        for name, value in expected.items():
            assert filled[previous][name] == pytest.approx(value)


@pytest.mark.parametrize("seed", range(3))
def test_categories_add_up_and_are_those_of_their_requests(seed):
    log = simulate(seed, k=3, is_ragged=True)
    by_category = measure(log, 3)["by_category"]
    for name in ("a", "b"):
        chosen = {one.request_id for one in log.requests if one.category == name and not one.is_warmup}
        drafts = [one for one in log.verify_steps if one.request_id in chosen and one.num_drafted]
        assert by_category[name]["drafts"] == len(drafts)
        assert by_category[name]["accepted_tokens"] == sum(one.num_accepted for one in drafts)


def test_warmup_is_in_no_figure():
    log = simulate(3, num_warmup=0)
    noisy = simulate(3, num_warmup=0)
    noisy.requests.append(make_request("w", is_warmup=True, num_output_tokens=400, arrival_s=-50.0, last_token_s=900.0))
    noisy.verify_steps += [make_step("w", step, 4, 0) for step in range(399)]
    run = make_run(4)
    plain, with_warmup = compute_metrics(run, log), compute_metrics(run, noisy)
    assert with_warmup.pop("requests") == plain.pop("requests") | {"warmup": 1}
    for metrics in (with_warmup, plain):
        metrics["health"] = [check for check in metrics["health"] if check["name"] != "warmup"]
    assert with_warmup == plain


def test_speculation_off_is_not_measured_rather_than_zero():
    log = log_of_accepted([(0, 0, 0)], 0)
    metrics = compute_metrics(make_run(None, method="none"), log)
    acceptance = metrics["acceptance"]
    assert {value for value in acceptance.values() if not isinstance(value, list | dict)} == {None}
    assert not any(acceptance[name] for name in ("per_position", "by_previous", "accepted_histogram", "by_category"))
    identities = metrics["checks"]["identities"]
    assert identities["generated_tokens"] == {"left": 4, "right": 4, "holds": True}
    assert identities["sum_of_positions"]["holds"] is None
    for section in map(section_markdown, acceptance_sections(acceptance, {})):
        assert section.endswith("Nothing was drafted: speculation was off.")


def test_on_but_without_a_single_draft_counts_zero_and_has_no_rates():
    acceptance = compute_metrics(make_run(2), EventLog([make_request("r")]))["acceptance"]
    assert (acceptance["drafts"], acceptance["accepted_at_position"]) == (0, [0, 0])
    assert acceptance["acceptance_rate"] is acceptance["acceptance_length"] is None
    assert acceptance["per_position"] == [None, None]
    assert acceptance["autocorrelation"] == [None] * 8
