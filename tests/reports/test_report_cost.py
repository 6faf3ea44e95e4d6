"""The cost model: a simulated law comes back, speed-ups follow from it, and what cannot be known is n/a."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from specbench.records import EngineStep, VerifyStep
from specbench.reports.compare import Comparison, compare
from specbench.reports.compare_data import comparison_data
from specbench.reports.compare_sections import comparison_sections
from specbench.reports.compared_run import run_of_log
from specbench.reports.cost_law import fit_laws
from specbench.reports.cost_model import CostedRun, cost_metrics, costed_run, sweep_cost_model, without_pauses
from specbench.reports.cost_section import best_k_text, cost_section, sweep_cost_section
from specbench.reports.metrics import compute_metrics
from specbench.reports.shorter_drafts import kept_tokens
from specbench.reports.step_columns import StepColumns, step_columns
from specbench.reports.step_costs import step_costs
from specbench.reports.table import section_markdown, tables_of
from specbench.run_directory import EventLog
from tests.reports.event_logs import log_of_accepted, make_request, make_run, make_step

BATCHES = (1, 4, 16)


def law_s(k: int, batch: int, prompt: int = 0) -> dict[str, float]:
    """t = a + b · rows + c · k · batch + host, in seconds."""
    return {
        "target_s": 0.004 + 0.0001 * (batch * (k + 1) + prompt),
        "verify_s": 0.0005,
        "draft_s": k * (0.0008 + 0.00005 * batch),
        "schedule_s": 0.0002,
        "host_s": 0.0003 + 0.00002 * batch,
    }


def truth_s(k: int, batch: int) -> float:
    parts = law_s(k, batch)
    return parts["target_s"] + parts["verify_s"] + parts["draft_s"] + parts["host_s"]


def simulated(
    k: int,
    *,
    is_timed: bool = True,
    noise: float = 0.0,
    num_chunks: int = 0,
    batches: tuple[int, ...] = BATCHES,
    num_steps: int = 60,
) -> EventLog:
    """For each batch size, `num_steps` steps. Every text is hit, hit, miss over and over, walked with k drafts."""
    rng, clock, number = random.Random(k), 1.0, 0
    log = EventLog([make_request(f"r{index}", first_token_s=0.5, arrival_s=0.5) for index in range(max(batches))])
    accepted, steps = walked([True, True, False] * 2 * len(batches) * (num_steps + num_chunks), k), [0] * max(batches)
    engine_steps, rows = [], []
    for batch in batches:
        for index in range(num_steps + num_chunks):
            prompt = 64 + 16 * (index % 5) if index >= num_steps else 0
            parts = law_s(k, batch, prompt)
            factor = 1 + noise * rng.gauss(0, 1)
            step_s = factor * (parts["target_s"] + parts["verify_s"] + parts["draft_s"] + parts["host_s"])
            engine_steps.append(
                EngineStep(
                    engine_step=number,
                    start_s=clock,
                    end_s=clock + step_s,
                    num_prefill_tokens=prompt,
                    num_decode_requests=batch,
                    num_tokens=batch * (k + 1) + prompt,
                    schedule_s=parts["schedule_s"],
                    target_s=factor * parts["target_s"] if is_timed else None,
                    verify_s=factor * parts["verify_s"] if is_timed else None,
                    draft_s=factor * parts["draft_s"] if is_timed else None,
                    kv_blocks_used=1,
                    num_preempted=0,
                    num_evicted_blocks=0,
                )
            )
            clock += step_s
            for request in range(batch):
                step = steps[request]
                rows.append(make_step(f"r{request}", step, k, accepted[step], engine_step=number, batch_size=batch))
                steps[request] += 1
            number += 1
    log.verify_steps, log.engine_steps = rows, engine_steps
    log.requests = [
        replace(one, num_output_tokens=1 + sum(accepted[: steps[index]]) + steps[index])
        for index, one in enumerate(log.requests)
    ]
    return log


def columns_of(log: EventLog) -> StepColumns:
    return step_columns(log.requests, log.verify_steps)


def costed(k: int, **changes: object) -> CostedRun:
    log = simulated(k, **changes)
    run = costed_run(f"mtp{k}" if k else "none", columns_of(log), log.engine_steps, k)
    assert run is not None
    return run


def metrics_of(log: EventLog, k: int) -> dict:
    return cost_metrics(columns_of(log), log.engine_steps, k)


def cells(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


# ---- The law


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_law_over_several_k_comes_back(is_timed):
    runs = [costed(k, is_timed=is_timed) for k in (0, 1, 2, 4)]
    (law,) = fit_laws([run.costs for run in runs]).laws
    assert law.name == "fitted"
    for k in (0, 1, 3, 4, 8):  # 3 and 8 were not run
        for batch in (1, 4, 8, 16):
            assert law.step_s(batch, k) == pytest.approx(truth_s(k, batch), rel=0.01)


def test_the_law_stands_noise_and_pauses():
    logs = {k: simulated(k, noise=0.05) for k in (0, 2, 4)}
    for log in logs.values():
        log.engine_steps[30:] = [
            replace(step, start_s=step.start_s + 5, end_s=step.end_s + 5) for step in log.engine_steps[30:]
        ]  # a pause of five seconds before one step
    runs = [step_costs(columns_of(log), log.engine_steps, k) for k, log in logs.items()]
    (law,) = fit_laws(runs).laws
    for k in (0, 2, 4):
        for batch in BATCHES:
            assert law.step_s(batch, k) == pytest.approx(truth_s(k, batch), rel=0.03)
    assert law.target.residual == pytest.approx(0.05 * 0.6745, rel=0.3)  # the median of |normal|


def test_one_run_with_chunks_gives_a_range_that_holds_the_truth():
    """Rows are 5 times requests in every step of decode: two laws fit, and prompt chunks bound them."""
    laws = fit_laws([costed(4, num_chunks=30).costs]).laws
    assert [law.name for law in laws] == ["rows", "requests"]
    for batch in BATCHES:
        for k in range(5):
            low, high = sorted(law.step_s(batch, k) for law in laws)
            assert 0.98 * low <= truth_s(k, batch) <= 1.02 * high
            # Rows of a chunk cost here what a row of a verification does, so the second law is the true one.
            assert laws[1].step_s(batch, k) == pytest.approx(truth_s(k, batch), rel=0.02)
        assert laws[0].step_s(batch, 4) == pytest.approx(truth_s(4, batch), rel=0.02)  # what was seen is no range


def test_without_chunks_nothing_need_belong_to_rows():
    rows, requests = fit_laws([costed(4).costs]).laws
    assert requests.target.coefficients[2] == 0  # a row
    assert rows.target.coefficients[1] == 0  # a request
    assert rows.step_s(16, 0) < requests.step_s(16, 0)


def test_too_few_steps_make_no_law():
    log = simulated(2, batches=(2,), num_steps=19)
    found = metrics_of(log, 2)
    assert found["laws"] == found["predictions"] == []
    assert "fewer than 20 steps" in found["reason"]
    assert found["time"]["target_s"] > 0
    assert "No law of cost" in section_markdown(cost_section(found))


def test_steps_of_equal_rows_tell_nothing_of_a_row():
    found = metrics_of(simulated(4, batches=(4,)), 4)
    assert found["laws"] == found["predictions"] == []
    assert "as many rows" in found["reason"]
    assert found["by_batch"][0]["steps"] == 60  # what was measured stands
    assert len(fit_laws([costed(k, batches=(4,)).costs for k in (0, 4)]).laws) == 1  # other k have other rows


def test_steps_that_scatter_make_no_law():
    """A machine that was busy with something else: half of all steps take ten times as long."""
    log, clock, steps = simulated(4), 1.0, []
    for index, step in enumerate(log.engine_steps):
        factor = 10 if index % 2 else 1
        end_s = clock + factor * (step.end_s - step.start_s)
        parts = {name: factor * getattr(step, name) for name in ("target_s", "verify_s", "draft_s")}
        steps.append(replace(step, start_s=clock, end_s=end_s, **parts))
        clock = end_s
    log.engine_steps = steps
    found = metrics_of(log, 4)
    assert found["laws"] == []
    assert "scatter too much" in found["reason"]


# ---- Time of steps


def test_a_step_in_decode_is_charged_from_the_end_of_the_one_before():
    requests = [make_request("w", is_warmup=True, arrival_s=0.0), make_request("r", arrival_s=1.0)]

    def step(number: int, start_s: float, end_s: float, prompt: int, batch: int) -> EngineStep:
        return EngineStep(number, start_s, end_s, prompt, batch, prompt + batch, 0.0, 0.1, 0.1, 0.0, 1, 0, 0)

    steps = [
        step(0, 0.2, 0.9, 0, 1),  # warm-up
        step(1, 1.0, 1.5, 10, 0),
        step(2, 1.6, 2.0, 0, 1),  # 0.1 s of host before it
        step(3, 1.9, 2.4, 0, 1),  # overlaps the one before
        step(4, 3.4, 4.0, 10, 0),  # idle before it
    ]
    columns = step_columns(requests, [make_step("r", 0, 0, 0, engine_step=2), make_step("r", 1, 0, 0, engine_step=3)])
    costs = step_costs(columns, steps, 0)
    assert costs.step_s == pytest.approx([0.5, 0.5, 0.4, 0.6])
    assert costs.host_s == pytest.approx([0.3, 0.3, 0.2, 0.4])
    assert costs.num_kept_tokens.tolist() == [0, 1, 1, 0]
    time = cost_metrics(columns, steps, 0)["time"]
    assert time == pytest.approx(
        {
            "duration_s": 3.0,
            "decode_s": 0.9,
            "decode_with_prompt_s": 0.0,
            "prompt_s": 1.1,
            "between_s": 1.0,
            "target_s": 0.4,
            "verify_s": 0.4,
            "draft_s": 0.0,
            "host_s": 1.2,
        }
    )


def test_engine_steps_without_numbers_of_their_own_are_not_joined():
    log = simulated(2, batches=(2,))
    log.engine_steps = [replace(step, engine_step=0) for step in log.engine_steps]
    (row,) = metrics_of(log, 2)["by_batch"]
    assert row["tokens_per_request_step"] is None
    assert row["step_ms"] == pytest.approx(1000 * truth_s(2, 2))


def test_means_by_batch():
    rows = {row["batch"]: row for row in metrics_of(simulated(2, num_chunks=5), 2)["by_batch"]}
    assert list(rows) == list(BATCHES)
    assert rows[4]["steps"] == 60  # chunks are not among them
    assert rows[4]["rows"] == 12
    assert rows[4]["tokens_per_request_step"] == pytest.approx(3)
    assert rows[4]["draft_ms"] == pytest.approx(1000 * law_s(2, 4)["draft_s"])
    assert rows[4]["host_ms"] == pytest.approx(1000 * law_s(2, 4)["host_s"])


def test_pauses_are_left_out_of_a_mean():
    assert without_pauses(np.array([1.0, 1.1, 0.9, 1.0, 50.0])).tolist() == [1.0, 1.1, 0.9, 1.0]
    assert without_pauses(np.array([2.0, 2.0])).tolist() == [2.0, 2.0]


def with_pauses(log: EventLog, places: range, pause_s: float) -> EventLog:
    """The same steps, with a wait of `pause_s` in those at `places`."""
    shift_s, steps = 0.0, []
    for place, step in enumerate(log.engine_steps):
        longer_s = pause_s if place in places else 0.0
        steps.append(replace(step, start_s=step.start_s + shift_s, end_s=step.end_s + shift_s + longer_s))
        shift_s += longer_s
    log.engine_steps = steps
    return log


@pytest.mark.parametrize(
    ("places", "pause_s", "status"),
    [
        (range(0), 0.0, "ok"),
        (range(0, 180, 9), 0.05, "ok"),
        (range(7, 8), 0.1, "ok"),
        (range(0, 180, 9), 2.0, "warning"),
    ],
)
def test_a_run_whose_steps_were_held_up_says_so(places: range, pause_s: float, status: str):
    metrics = compute_metrics(make_run(4), with_pauses(simulated(4, noise=0.1), places, pause_s))
    (check,) = [one for one in metrics["health"] if one["name"] == "held_up"]
    assert check["status"] == status, check["seen"]


def test_held_up_steps_are_counted():
    metrics = metrics_of(with_pauses(simulated(4), range(0, 180, 9), 2.0), 4)
    held_up = metrics["held_up"]
    assert (held_up["judged"], held_up["steps"]) == (180, 20)
    quiet_s = sum(60 * truth_s(4, batch) for batch in BATCHES)
    held_s = 40.0 + sum(truth_s(4, BATCHES[place // 60]) for place in range(0, 180, 9))
    assert held_up["share"] == pytest.approx(held_s / (quiet_s + 40.0))
    assert held_up["longest_ms"] == pytest.approx(1000 * (2.0 + truth_s(4, BATCHES[-1])))
    few = metrics_of(with_pauses(simulated(4, num_steps=19), range(0, 57, 9), 2.0), 4)
    assert few["held_up"] == {"judged": 0, "steps": None, "share": None, "longest_ms": None}


# ---- Not measured


def test_no_engine_steps_are_not_measured():
    log = log_of_accepted([(1, 2)] * 30, 4)
    found = compute_metrics(make_run(4), log)["cost_model"]
    assert found["time"] is None
    assert found["reason"] == "no engine steps were recorded"
    assert section_markdown(cost_section(found)).endswith("Not measured: no engine steps were recorded.")


def test_missing_timings_give_na():
    """On a GPU the host's clock does not time parts: one k then says nothing of drafting."""
    found = metrics_of(simulated(4, is_timed=False), 4)
    assert found["time"]["target_s"] is found["time"]["host_s"] is None
    assert {law["name"]: law["draft_pass"] for law in found["laws"]} == {"rows": None, "requests": None}
    (row, *_) = found["by_batch"]
    assert row["draft_ms"] is row["host_ms"] is None
    assert row["step_ms"] == pytest.approx(1000 * truth_s(4, 1))
    for prediction in found["predictions"]:
        assert prediction["best_k"] == [None, None]
        assert prediction["break_even_tokens_low"] is prediction["perfect_speedup_high"] is None
        assert [entry["speedup_low"] for entry in prediction["by_k"][1:]] == [None] * 4
    text = section_markdown(cost_section(found))
    assert "best k n/a" in text
    assert "| Drafting | n/a | n/a |" in " ".join(text.split())


# ---- Speed-ups


def test_predicted_speedups_follow_the_law():
    """Texts of hit, hit, miss keep 1, 1.5 or 3 tokens a step with 0, 1 or 4 drafts, and the law is known."""
    runs = [costed(k) for k in (0, 1, 4)]
    found = sweep_cost_model(runs)
    for entry in found["batches"]:
        batch = entry["batch"]
        for run in entry["runs"]:
            k = run["k"]
            exact = {0: 1, 1: 1.5, 4: 3}[k] * truth_s(0, batch) / truth_s(k, batch)
            assert run["speedup"] == pytest.approx(exact, rel=0.001)
            assert run["law_speedup_low"] == run["law_speedup_high"] == pytest.approx(exact, rel=0.02)
    text = section_markdown(sweep_cost_section(found))
    assert "by mtp4 alone" in text
    assert "measured best mtp" in text


def test_without_a_plain_run_no_speedup_is_measured():
    found = sweep_cost_model([costed(2), costed(4)])
    assert {run["speedup"] for entry in found["batches"] for run in entry["runs"]} == {None}
    assert "no speed-up was measured" in section_markdown(sweep_cost_section(found))


def compared(*ks: int, **changes: object) -> Comparison:
    """Runs with so many drafts; `changes` are those of the last run's record."""
    records = [make_run(k or None, method="mtp" if k else "none") for k in ks]
    records[-1] = replace(records[-1], **changes)
    return compare([run_of_log(record, simulated(k), "runs/x") for record, k in zip(records, ks, strict=True)])


def test_a_comparison_measures_the_speedup():
    comparison = compared(0, 4)
    titles = {section.title: section for section in comparison_sections(comparison)}
    text = section_markdown(titles["Cost of a step, and speed by k"])
    exact = 3 * truth_s(0, 16) / truth_s(4, 16)
    assert f"| mtp4 | 4 | 60 | 3.00 | {1000 * truth_s(4, 16):.2f} |" in " ".join(text.split())
    assert f"| {exact:.2f} |" in " ".join(text.split("16 requests in decode")[1].split())
    runs = {run["label"]: run for run in comparison_data(comparison)["costs"]["batches"][-1]["runs"]}
    assert runs["mtp4"]["speedup"] == pytest.approx(exact)


def test_costs_of_other_hardware_or_of_one_k_are_not_put_together():
    assert compared(0, 4, hardware={"cpu": "another", "gpus": []}).costs is None
    assert compared(4, 4).costs is None


def test_best_k_break_even_and_perfect_drafts():
    """Known law, batch 4, texts of hit, hit, miss: k = 2 is best, 3 and 4 pay for drafts that fail."""
    found = metrics_of(simulated(4, num_chunks=30), 4)
    prediction = next(one for one in found["predictions"] if one["batch"] == 4)
    assert [one["tokens"] for one in found["tokens_per_step"]] == pytest.approx([1, 1.5, 3, 3, 3], rel=0.02)
    assert {best["best"] for best in prediction["best_k"]} == {2}
    exact = truth_s(4, 4) / truth_s(0, 4)
    assert prediction["break_even_tokens_low"] <= exact * 1.02
    assert prediction["break_even_tokens_high"] >= exact * 0.98
    assert prediction["perfect_speedup_low"] == pytest.approx(5 / prediction["break_even_tokens_high"])
    assert prediction["perfect_speedup_high"] == pytest.approx(5 / prediction["break_even_tokens_low"])
    assert "4 requests: best k = 2" in section_markdown(cost_section(found))


def test_flat_optimum_in_words():
    one = {"best": 3, "flat_from": 2, "flat_to": 4}
    assert best_k_text([one]) == "k = 3 (2 to 4 within 2% of it)"
    other = {"best": 2, "flat_from": 2, "flat_to": 2}
    each = "k = 3 (2 to 4 within 2% of it) by one law, k = 2 (no other within 2% of it) by the other"
    assert best_k_text([one, other]) == each
    assert best_k_text([one, one | {"best": 4}]) == "k between 2 and 4: all within 2% of each other"
    assert best_k_text([{"best": 1, "flat_from": 1, "flat_to": 1}]) == "k = 1 (no other within 2% of it)"
    assert best_k_text([one, None]) == "k n/a"


def test_a_run_without_speculation_has_a_law_and_no_predictions():
    found = metrics_of(simulated(0), 0)
    assert found["laws"][0]["draft_pass"] is None
    text = section_markdown(cost_section(found))
    assert "Predicted for every k" not in text
    assert "| Drafting | 0.00 | 0.00% |" in " ".join(text.split())


# ---- Tokens a step with fewer drafts


def tokens(rows: list[tuple[int, ...]], k: int) -> dict[int, tuple[float, float, float]]:
    log = log_of_accepted(rows, k)
    return {one.k: (one.tokens, one.low, one.high) for one in kept_tokens(columns_of(log), k)}


def test_fewer_drafts_by_hand():
    """Accepted 2 of 2, then 0, then 1: hits h h ? x h x, where ? was never drafted.

    k = 1: h+h, then ?: as a miss "?", "x", "h x" (4 steps), as a hit "? x", "h x" (3 steps).
    """
    found = tokens([(2, 0, 1)], 2)
    assert found[2] == (2.0, 2.0, 2.0)
    assert found[1][1:] == (6 / 4, 6 / 3)
    assert found[0] == (1.0, 1.0, 1.0)


def test_a_stop_inside_a_chunk_ends_its_text():
    log = EventLog([make_request("r", num_output_tokens=5)], [make_step("r", 0, 4, 4, num_emitted=4)])
    found = {one.k: one.tokens for one in kept_tokens(columns_of(log), 4)}
    assert found[4] == 4  # one step, cut off by the stop
    assert found[1] == 2  # two steps of a draft and a bonus token each
    assert found[2] == 2  # three tokens, then one


@pytest.mark.parametrize("seed", range(2))
def test_a_text_of_known_hits_is_cut_as_it_would_have_been(seed):
    """Each token is a hit or not, whatever drafts it; hard and easy stretches. Cut from k = 8, against walked at k."""
    rng = random.Random(seed)
    texts, is_easy = [], True
    for _ in range(60):
        text = []
        for _ in range(400):
            is_easy = is_easy != (rng.random() < 0.1)
            text.append(rng.random() < (0.93 if is_easy else 0.5))
        texts.append(text)
    found = tokens([walked(text, 8) for text in texts], 8)
    for k in range(1, 9):
        steps = [walked(text, k) for text in texts]
        exact = sum(sum(row) + len(row) for row in steps) / sum(map(len, steps))
        assert found[k][0] == pytest.approx(exact, rel=0.01)
        assert found[k][1] <= exact * 1.005 <= found[k][2] * 1.01


def walked(text: list[bool], k: int) -> tuple[int, ...]:
    row, place = [], 0
    while place + k < len(text):
        accepted = next((i for i in range(k) if not text[place + i]), k)
        row.append(accepted)
        place += accepted + 1
    return tuple(row)


def test_nothing_kept_is_nothing_cut():
    assert kept_tokens(step_columns([make_request("r")], []), 4) == []
    rows: list[VerifyStep] = [make_step("r", 0, 4, 0, num_emitted=0)]
    assert kept_tokens(step_columns([make_request("r")], rows), 4) == []


def test_steps_that_were_left_out_are_named_by_part():
    found = metrics_of(simulated(4), 4)
    for law in found["laws"]:
        for part in ("target", "draft_pass", "host"):
            law[part]["left_out_share"] = 0.0
    assert "left out of the fit" not in section_markdown(cost_section(found))
    found["laws"][0]["draft_pass"]["left_out_share"] = 0.8224
    text = section_markdown(cost_section(found))
    assert "left out of the fit of a part: 82.24% of the time of one draft pass." in text


def test_predicted_ranges_are_lists_in_files():
    found = metrics_of(simulated(4), 4)
    table = next(one for one in tables_of([cost_section(found)]) if one.name == "predicted_speedup")
    entry = found["predictions"][0]["by_k"][0]
    values = dict(zip(table.header, (cell.value for cell in table.rows[0]), strict=True))
    assert json.loads(values["Speed-up"]) == [entry["speedup_low"], entry["speedup_high"]]
    assert json.loads(values["Step (ms)"]) == [entry["step_ms_low"], entry["step_ms_high"]]
