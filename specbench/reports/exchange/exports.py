"""A run directory in the formats of other tools.

Belongs here: which formats there are. Does not belong here: any tool's keys.
"""

from __future__ import annotations

import json
from pathlib import Path

from specbench.reports.exchange.speculation_profile import export_profile
from specbench.reports.exchange.vllm_bench import export_vllm
from specbench.reports.report_files import Report
from specbench.run_directory import RunDirectory

EXPORTS = {"vllm": export_vllm, "speculation_profile": export_profile}


def export_text(directory: Path, form: str) -> str:
    """The JSON of one of the EXPORTS, anew from the event log. Nothing is written."""
    content = EXPORTS[form](Report.of(RunDirectory.open(directory)))
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
