"""The losslessness table in words, and what metrics.json keeps of it."""

from __future__ import annotations

from dataclasses import replace

from specbench.records import LosslessnessCell, LosslessnessCheck
from specbench.reports.losslessness_section import losslessness_lines, losslessness_metrics, losslessness_sections
from specbench.reports.table import section_markdown

TEXTS = LosslessnessCell("ngram", 4, "argmax", "greedy", "token for token", "near_ties", 10, 9, 1, 0)
LAW = LosslessnessCell(
    "mtp_multi",
    2,
    "block",
    "temperature 1",
    "law of output tokens 1 to 3",
    "consistent",
    2000,
    statistic=31.5,
    p_value=0.25,
    detectable=0.07,
    detectable_unit="share of draws turned into the likeliest continuation",
)
DIFFERENCE = {
    "request_id": "r3",
    "output_index": 5,
    "speculative": 17,
    "plain": None,
    "margin": 0.00123,
    "allowed": 0.002,
    "is_near_tie": True,
}


def markdown(check: LosslessnessCheck) -> str:
    (section,) = losslessness_sections(check)
    return section_markdown(section)


def test_each_cell_says_what_it_found_and_could_have_seen() -> None:
    text = markdown(LosslessnessCheck("near_ties", [TEXTS, LAW], [DIFFERENCE]))
    assert "identical but for near ties in 2 tests" in text
    assert losslessness_lines(LosslessnessCheck("mismatch", [TEXTS])) == ["Losslessness: **MISMATCH** in 1 test"]
    assert "identical but for near ties (9 identical, 1 near ties, 0 different)" in text
    assert "consistent with one law" in text and "| 0.25 " in text
    assert "7.00% of draws turned into the likeliest continuation, with a probability of 90%" in text
    row = next(line for line in text.splitlines() if line.startswith("| r3"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "r3",
        "5",
        "17",
        "ends",
        "0.00123",
        "0.002",
        "near tie",
    ]


def test_what_could_not_have_been_seen_and_what_was_not_tested() -> None:
    blind = replace(LAW, detectable=None)
    nats = replace(LAW, detectable=0.05, detectable_unit="nats a token, mean over prompts", status="mismatch")
    few = replace(LAW, p_value=None, detectable=None, status="not_checked", reason="5 prompts are too few")
    text = markdown(LosslessnessCheck("mismatch", [blind, nats, few]))
    assert "no share of draws turned into the likeliest continuation, with a probability of 90%" in text
    assert "0.05 nats a token, mean over prompts, with a probability of 90%" in text
    assert "**MISMATCH**" in text and "not checked: 5 prompts are too few" in text


def test_nothing_without_a_plain_side() -> None:
    assert losslessness_sections(None) == losslessness_lines(None) == []
    assert losslessness_metrics(None)["status"] == "not_checked"
    synthetic = LosslessnessCheck("not_applicable", reason="drafts are accepted by coins")
    assert "not applicable: drafts are accepted by coins" in markdown(synthetic)


def test_metrics_sum_over_texts_alone() -> None:
    found = losslessness_metrics(
        LosslessnessCheck("near_ties", [TEXTS, replace(TEXTS, identical=10, near_ties=0), LAW])
    )
    assert (found["identical"], found["near_ties"], found["mismatches"]) == (19, 1, 0)
    assert [cell["p_value"] for cell in found["cells"]] == [None, None, 0.25]
    assert losslessness_metrics(LosslessnessCheck("consistent", [LAW]))["identical"] is None
