"""A comparison in words and tables: verdict, tables, what could have been seen, texts, what differs.

Belongs here: the sentences of a comparison and the order of its sections. Does not belong here: anything computed.

No speed figure stands without the output check of its run, and no sentence calls a drafter better: with another k the
steps are others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from specbench.reports.changes import Change, PairChanges
from specbench.reports.comparability import differences_table
from specbench.reports.compare import Comparison, Pair
from specbench.reports.compared_run import ComparedRun
from specbench.reports.cost_section import sweep_cost_section
from specbench.reports.decomposition import Decomposition
from specbench.reports.decomposition_section import decomposition_section
from specbench.reports.figures import ACCEPTANCE_LENGTH, ACCURACY, OUTPUT_THROUGHPUT
from specbench.reports.gate_section import gate_section
from specbench.reports.gates import GateResult
from specbench.reports.health_check import FAILED, WARNING
from specbench.reports.identities import broken_identities
from specbench.reports.markdown import data_title, is_unfinished, model_title
from specbench.reports.number_format import NOT_MEASURED, count, decimal, decimal_range, p_value, percent, points
from specbench.reports.same_token_section import same_token_section, same_token_sentence
from specbench.reports.side_by_side import (
    benchmark_table,
    bucket_table,
    category_table,
    change_text,
    check_text,
    conditional_table,
    evaluation_table,
    latency_table,
)
from specbench.reports.speedup import speedup
from specbench.reports.statistics import MIN_REPEATS, MIN_SAMPLES
from specbench.reports.table import Cell, ReportTable, Section, label_cell, section_markdown, text_cell
from specbench.reports.text_difference import text_sentence, text_table

_MEAN_OF_REPEATS = "mean of repeats"
_UNADJUSTED = (
    "Intervals are 95% bootstrap intervals over samples (all turns and repeats of one together, base and new drawn "
    "alike), those of speed Student's over repeats; **they are not adjusted** for how many there are. p is that of "
    "swapping base and new within samples (accuracy: exact McNemar), adjusted by Holm within a family, and decides on "
    "marks. "
    "The smallest visible difference is 2.8 paired standard errors. Speed is tested as the mean of repeats; the tables "
    "above give it over all requests together, and the two can differ in sign."
)


def comparison_markdown(comparison: Comparison, gates: Sequence[GateResult] = ()) -> str:
    """The whole document."""
    sections = comparison_sections(comparison, gates)
    head = [f"# {comparison_title(comparison)}", comparison_subtitle(comparison.base)]
    return "\n\n".join([*head, *(section_markdown(section) for section in sections)]) + "\n"


def comparison_title(comparison: Comparison) -> str:
    """`mtp8 against mtp1`"""
    return f"{', '.join(pair.new.label for pair in comparison.pairs)} against {comparison.base.label}"


def comparison_sections(comparison: Comparison, gates: Sequence[GateResult] = ()) -> list[Section]:
    """Every section in its order; those with nothing to say are left out."""
    runs, changes = comparison.runs, comparison.changes
    sections = [
        Section("Verdict", ("\n".join(f"- {line}" for line in verdict_lines(comparison)),)),
        gate_section(gates),
        Section("Benchmark", (benchmark_table(runs, changes),)),
        Section("Accuracy", (evaluation_table(runs, changes), *_flips(comparison))),
        Section("Differences, and what could have been seen", tuple(_difference_blocks(comparison))),
        _of_tables("Acceptance given the previous step", bucket_table(runs, changes), conditional_table(runs)),
        *_explanations(comparison),
        _of_tables("Acceptance by category", category_table(runs, changes)),
        Section("Texts", tuple(_text_blocks(comparison))),
        *([] if comparison.costs is None else [sweep_cost_section(comparison.costs)]),
        Section("Latency in full", (latency_table(runs, changes),)),
        Section("What differs", (differences_table(runs),)),
        Section("Runs", (_run_table(runs),)),
    ]
    return _with_table_names_of_their_own([section for section in sections if section.blocks])


def _with_table_names_of_their_own(sections: Iterable[Section]) -> list[Section]:
    """The same sections, the tables of the second new run named `texts_2` and so on: names become file names."""
    seen: Counter[str] = Counter()

    def named(block: str | ReportTable) -> str | ReportTable:
        if isinstance(block, str):
            return block
        seen[block.name] += 1
        number = seen[block.name]
        return block if number == 1 else replace(block, name=f"{block.name}_{number}")

    return [replace(section, blocks=tuple(map(named, section.blocks))) for section in sections]


def verdict_lines(comparison: Comparison) -> list[str]:
    """What a reader must know before any figure, then the headline figures, a sentence each."""
    lines = [line for pair in comparison.pairs for line in pair.grounds.sentences(pair.new.label)]
    lines += state_lines(comparison)
    lines += [line for run in comparison.runs for line in _warnings(run)]
    checks = ", ".join(f"{run.label} {check_text(run)}" for run in comparison.runs)
    lines.append(f"Output checks: {checks}")
    for pair in comparison.pairs:
        lines += _pair_lines(comparison.base, pair, len(comparison.pairs) > 1)
    return lines


def state_lines(comparison: Comparison) -> list[str]:
    """A line for each run with faults injected on purpose, or with health checks that were raised."""
    return [line for run in comparison.runs if (line := _state(run)) is not None]


def comparison_subtitle(base: ComparedRun) -> str:
    """Which model on which data."""
    record = base.record
    return f"{model_title(record.model)}; {data_title(record.data, record.config['eval']['name'])}"


def _of_tables(title: str, *tables: ReportTable | None) -> Section:
    return Section(title, tuple(table for table in tables if table is not None))


# ---- The verdict


def _state(run: ComparedRun) -> str | None:
    """`**mtp8**: **faults injected**: raw_embedding; **health checks**: failed identities; warning p99_requests`"""
    parts = []
    if faults := run.record.config["spec"].get("faults"):
        parts.append(f"**faults injected on purpose**: {', '.join(faults)}")
    checks = [
        f"{status} {', '.join(names)}"
        for status in (FAILED, WARNING)
        if (names := [one["name"] for one in run.metrics["health"] if one["status"] == status])
    ]
    if checks:
        parts.append(f"**health checks**: {'; '.join(checks)}")
    return f"**{run.label}**: {'; '.join(parts)}" if parts else None


def _warnings(run: ComparedRun) -> Iterable[str]:
    """What is wrong with a run by itself."""
    requests = run.metrics["requests"]
    if is_unfinished(run.record):
        yield f"**{run.label} is unfinished**: its figures cover {count(requests['completed'])} completed requests"
    elif run.record.error is not None:
        yield f"**{run.label} failed**: {run.record.error}"
    if bad := requests["failed"] + requests["aborted"]:
        yield f"**{run.label}: {count(bad)} requests failed or were aborted**: wrong, and in no latency"
    if broken := broken_identities(run.metrics):
        yield f"**{run.label}: identities broken** ({', '.join(broken)}): its counts contradict each other, trust none"
    if not run.record.hardware:
        yield f"**{run.label}: its hardware is not recorded**: a difference in speed may be one of hardware"
    if run.metrics["checks"]["output"]["status"] == "mismatch":
        yield f"**{run.label}: its output check failed**: what it emitted is not what plain decoding gives"


def _pair_lines(base: ComparedRun, pair: Pair, is_named: bool) -> list[str]:
    changes = pair.changes.by_path
    lines = [_text_line(base, pair), None if pair.layout is None else pair.layout.sentence]
    if pair.grounds.model is None:
        lines += [
            _change_line("Accuracy", changes[ACCURACY.path], pair),
            _drafts_line(base, pair),
            _speed_line(base, pair, changes[OUTPUT_THROUGHPUT.path]),
            _position_0_line(pair),
            None
            if pair.same_token is None
            else f"Same tokens: {same_token_sentence(pair.same_token).removesuffix('.')}",
        ]
    prefix = f"{pair.new.label}: " if is_named else ""
    return [f"{prefix}{line}" for line in lines if line is not None]


def _text_line(base: ComparedRun, pair: Pair) -> str | None:
    if pair.texts is None:
        return None
    methods = [run.record.config["spec"]["method"] for run in (base, pair.new)]
    if methods == ["none", "none"]:
        role = " (plain decoding in both)"
    elif "none" in methods:
        role = " (a run without speculation is the whole output check of the other)"
    else:
        role = ""
    sampled = "; sampled above temperature 0" if base.is_sampled or pair.new.is_sampled else ""
    return text_sentence(pair.texts) + role + sampled + _contradiction(base, pair)


def _contradiction(base: ComparedRun, pair: Pair) -> str:
    """Where texts differ although each run's text was found to be that of plain decoding."""
    checks = [run.metrics["checks"]["output"] for run in (base, pair.new)]
    if pair.texts is None or not pair.texts.differing or any(check["status"] != "identical" for check in checks):
        return ""
    compared = " and ".join(count(check["compared"]) for check in checks)
    return f"; although both output checks are identical, over {compared} outputs"


def _drafts_line(base: ComparedRun, pair: Pair) -> str | None:
    """The length; that other k make other steps is said here."""
    change = pair.changes.by_path[ACCEPTANCE_LENGTH.path]
    if change.base is None or change.new is None:
        return None
    k = (base.num_speculative_tokens, pair.new.num_speculative_tokens)
    line = _change_line("Acceptance length", change, pair)
    if pair.changes.equal_k:
        return line
    return (
        f"{line}. k is {k[0]} and {k[1]}: acceptance and ITL per step are of other steps, so none of them is better or "
        "worse"
    )


def _position_0_line(pair: Pair) -> str | None:
    """The terms of the difference at position 0; their classes and intervals have a section."""
    found = pair.decomposition
    if found is None or found.mix is None or found.rate is None:
        return None
    total = found.total.difference
    seen = {True: "visible", False: "no difference visible", None: "too few samples to say"}[found.rate.is_visible]
    seen = "the same in every sample" if found.rate.standard_error == 0 else seen
    selection = "" if found.is_same_k else "; with another k, text of other difficulty is behind it too"
    return (
        f"Position 0 behind a step with drafts: {percent(total.base)} to {percent(total.new)}, of which "
        f"{points(found.mix.value)} come from what the drafts follow{_unmatched_text(found)}, and "
        f"{points(found.rate.value)} remain within matched history ({seen}{selection})"
    )


def _unmatched_text(found: Decomposition) -> str:
    """The third term, where it is not zero: without it the others do not add up to the difference."""
    if all(one.is_matched for one in found.classes) or not found.unmatched or not found.unmatched.value:
        return ""
    return f", {points(found.unmatched.value)} come from classes that only one run has"


def _change_line(what: str, change: Change, pair: Pair) -> str | None:
    """`Acceptance length: 1.84 to 4.40 (+139.1%), 95% interval +2.4 to +2.7 tokens: better`; None if not measured."""
    if change.base is None and change.new is None:
        return None
    figure = change.figure
    unit = "%" if figure.is_fraction else ""
    base, new = (
        NOT_MEASURED if value is None else f"{figure.written(value)}{unit}" for value in (change.base, change.new)
    )
    return f"{what}: {base} to {new} ({figure.change_text(change.change)}){_judgement(change, pair)}"


def _judgement(change: Change, pair: Pair) -> str:
    if change.difference is None or change.adjusted_p_value is None:
        return f"; not tested: {_untested_reason(change, pair)}"
    if change.alike is not None:
        return f": {change.alike}"
    if change.verdict != "no difference visible":
        return f"{_interval_text(change)}: **{change.verdict}**"
    visible = change.difference.smallest_visible
    seen = (
        "" if visible is None else f"; one of {change.figure.difference_text(visible).lstrip('+')} could have been seen"
    )
    return f"{_interval_text(change)}: no difference visible{seen}"


def _interval_text(change: Change) -> str:
    if change.difference is None or change.difference.interval is None:
        return ""
    low, high = (change.figure.difference_text(bound) for bound in change.difference.interval)
    unit = " tokens" if change.figure == ACCEPTANCE_LENGTH else ""  # beside a change in percent
    return f", 95% interval {low} to {high}{unit}"


def _untested_reason(change: Change, pair: Pair) -> str:
    if not pair.grounds.is_paired:
        return "samples are not paired"
    is_of_drafts = change.figure.kind in ("drafts", "position")
    if is_of_drafts and pair.changes.no_drafts is not None:
        return pair.changes.no_drafts
    if not is_of_drafts and pair.grounds.scorer:
        return "answers are not paired"
    return f"fewer than {MIN_SAMPLES} samples"


def _speed_line(base: ComparedRun, pair: Pair, change: Change) -> str | None:
    """With the output checks that vouch for it."""
    if change.base is None or change.new is None:
        return None
    checks = f"output checks: {check_text(base)}, {check_text(pair.new)}"
    line = f"Output token throughput: {change.base:.2f} to {change.new:.2f} tok/s ({change_text(change)}; {checks})"
    if change.void:
        return line
    if base.record.config["spec"]["method"] == "none" and pair.new.is_drafted and change.base:
        line += f"; {_speedup_text(base, pair.new)}"
    if change.difference is None:
        repeats = min(base.num_repeats, pair.new.num_repeats)
        return f"{line}; no interval: {repeats} of the {MIN_REPEATS} repeats that one needs"
    found = change.difference
    if change.alike is not None or found.interval is None:
        return f"{line}: {change.alike or change.verdict}"
    low, high = map(change.figure.difference_text, found.interval)
    mean = f"{_MEAN_OF_REPEATS} {change.figure.difference_text(found.difference)} tok/s"
    return f"{line}; {mean}, 95% interval {low} to {high} tok/s: {change.verdict}"


def _speedup_text(base: ComparedRun, new: ComparedRun) -> str:
    """`1.85 times plain decoding (95% interval 1.80 to 1.90)`"""
    found = speedup(base, new)
    assert found is not None, "both were measured"
    interval = "" if found.interval is None else f" (95% interval {decimal_range(found.interval)})"
    return f"{decimal(found.value)} times plain decoding{interval}"


# ---- Sections


def _flips(comparison: Comparison) -> list[ReportTable]:
    """Answers that changed, of each pair whose answers are paired."""
    rows = []
    for pair in comparison.pairs:
        if pair.changes.answers is None:
            continue
        flips, p = pair.changes.answers.flips, pair.changes.by_path[ACCURACY.path].p_value
        test = "swapping samples" if flips.p_value is None else "exact McNemar"
        counts = (flips.compared, flips.only_base, flips.only_new)
        rows.append(
            (text_cell(pair.new.label), *(Cell(one, count(one)) for one in counts), Cell(p, f"{p_value(p)} ({test})"))
        )
    if not rows:
        return []
    header = ("Run", "Answers compared", "Right in the base only", "Right in this run only", "p")
    note = "Failed requests and invalid answers are wrong."
    return [ReportTable("flips", "Answers that changed", header, tuple(rows), notes=(note,))]


def _difference_blocks(comparison: Comparison) -> Iterable[str | ReportTable]:
    tables = [_difference_table(pair.changes, pair.new.label) for pair in comparison.pairs]
    tables = [table for table in tables if table.rows]
    if not tables:
        yield "Nothing was tested: see the verdict for why."
        return
    yield _UNADJUSTED
    yield from tables


def _difference_table(changes: PairChanges, label: str) -> ReportTable:
    tested = [one for one in changes.by_path.values() if one.family is not None and not one.void]
    header = ("Figure", "Family", "Difference", "95% low", "95% high", "p", "p (Holm)", "Smallest visible", "Verdict")
    return ReportTable(
        "differences",
        f"{label} against the base",
        header,
        tuple(map(_difference_row, tested)),
        num_text_columns=2,
    )


def _difference_row(change: Change) -> tuple[Cell, ...]:
    found, figure = change.difference, change.figure
    assert found is not None
    low, high = found.interval if found.interval is not None and change.alike is None else (None, None)
    numbers = (found.difference, low, high)
    return (
        label_cell(figure.label + (f", {_MEAN_OF_REPEATS}" if figure.kind == "speed" else "")),
        text_cell(change.family),
        *(Cell(number, figure.difference_text(number)) for number in numbers),
        *(Cell(p, p_value(p)) for p in (change.p_value, change.adjusted_p_value)),
        Cell(found.smallest_visible, figure.difference_text(found.smallest_visible).lstrip("+")),
        text_cell(change.alike or change.verdict),
    )


def _explanations(comparison: Comparison) -> Iterable[Section]:
    """Of each pair that drafted; named where there are several."""
    for pair in comparison.pairs:
        sections = [] if pair.decomposition is None else [decomposition_section(pair.decomposition)]
        sections += [] if pair.same_token is None else [same_token_section(pair.same_token)]
        name = f": {pair.new.label}" if len(comparison.pairs) > 1 else ""
        yield from (Section(f"{section.title}{name}", section.blocks) for section in sections)


def _text_blocks(comparison: Comparison) -> Iterable[str | ReportTable]:
    for pair in comparison.pairs:
        if pair.texts is not None:
            yield f"{pair.new.label}: {text_sentence(pair.texts)}."
            if (table := text_table(pair.texts, comparison.base.label, pair.new.label)) is not None:
                yield table


def _run_table(runs: Iterable[ComparedRun]) -> ReportTable:
    rows = [
        tuple(map(text_cell, (run.label, run.directory, run.record.status, run.record.started_at, run.record.command)))
        for run in runs
    ]
    return ReportTable("runs", "Runs", ("Run", "Directory", "Status", "Started", "Command"), tuple(rows), 5)
