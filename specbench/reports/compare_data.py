"""A comparison as plain containers: what `specbench compare --format json` writes.

Belongs here: the keys of that file. Does not belong here: figures, sentences.

Numbers are unrounded and rates are fractions, as in metrics.json; tables hold values beside the text of the document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from specbench.records import SCHEMA_VERSION
from specbench.reports.changes import Change
from specbench.reports.compare import Comparison, Pair
from specbench.reports.compare_sections import comparison_sections, verdict_lines
from specbench.reports.compared_run import ComparedRun
from specbench.reports.gates import GateResult
from specbench.reports.table import ReportTable, Section
from specbench.reports.text_difference import TextComparison


def comparison_data(comparison: Comparison, gates: Sequence[GateResult] = ()) -> dict:
    """Everything that the document says, and every text that differs."""
    return {
        "schema_version": SCHEMA_VERSION,
        "runs": [_run(run) for run in comparison.runs],
        "verdict": verdict_lines(comparison),
        "pairs": [_pair(pair) for pair in comparison.pairs],
        "costs": comparison.costs,
        "gates": [_gate(result) for result in gates],
        "tables": [_table(table) for table in _tables(comparison_sections(comparison, gates))],
    }


def _run(run: ComparedRun) -> dict:
    return {
        "label": run.label,
        "directory": run.directory,
        "status": run.record.status,
        "model": asdict(run.record.model),
        "data": asdict(run.record.data),
        "output_check": run.metrics["checks"]["output"],
    }


def _pair(pair: Pair) -> dict:
    answers = pair.changes.answers
    return {
        "label": pair.new.label,
        "void": asdict(pair.grounds),
        "changes": [_change(change) for change in pair.changes.by_path.values()],
        "texts": None if pair.texts is None else _texts(pair.texts),
        "layout": None if pair.layout is None else asdict(pair.layout),
        "flips": None if answers is None else asdict(answers.flips),
        "decomposition": None if pair.decomposition is None else asdict(pair.decomposition),
        "same_token": None if pair.same_token is None else asdict(pair.same_token),
    }


def _texts(texts: TextComparison) -> dict:
    return {"compared": texts.compared, "identical": texts.identical, **asdict(texts)}


def _change(change: Change) -> dict:
    found = change.difference
    return {
        "path": change.figure.path,
        "family": change.family,
        "base": change.base,
        "new": change.new,
        "change": change.change,
        "interval": None if found is None else found.interval,
        "standard_error": None if found is None else found.standard_error,
        "smallest_visible": None if found is None else found.smallest_visible,
        "p_value": change.p_value,
        "adjusted_p_value": change.adjusted_p_value,
        "verdict": change.verdict,
        "void": change.void,
    }


def _gate(result: GateResult) -> dict:
    return {
        "gate": result.gate.text,
        "label": result.label,
        "value": result.value,
        "bound": result.bound,
        "margin_interval": result.interval,
        "outcome": result.outcome,
        "reason": result.reason,
    }


def _tables(sections: Iterable[Section]) -> Iterable[ReportTable]:
    return (block for section in sections for block in section.blocks if isinstance(block, ReportTable))


def _table(table: ReportTable) -> dict:
    return {
        "name": table.name,
        "title": table.title,
        "header": table.header,
        "values": [[cell.value for cell in row] for row in table.rows],
        "texts": [[cell.text for cell in row] for row in table.rows],
        "notes": table.notes,
    }
