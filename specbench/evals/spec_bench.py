"""Spec-Bench: 480 questions in thirteen categories, of which eight are MT-Bench's, with two turns.

Belongs here: where the questions come from. Does not belong here: their layout (question_turns.py).
"""

from __future__ import annotations

from specbench.errors import UserError
from specbench.evals.mt_bench import question_task
from specbench.evals.rows import read_rows
from specbench.evals.task import EvalModel, Task
from specbench.records import DataIdentity
from specbench.run_config import EvalConfig


def load_spec_bench(config: EvalConfig, model: EvalModel) -> Task:
    """The task; `model` makes no difference: no conversations come with specbench."""
    if config.data is None:
        raise UserError(
            "eval.data: Spec-Bench is on no hub; give data/spec_bench/question.jsonl of the repository "
            "hemingkx/Spec-Bench"
        )
    file = read_rows(config.data, "eval.data")
    data = DataIdentity("spec_bench", str(file.path), None, file.sha256, packaged=False)
    return question_task("spec_bench", file.rows, data, config)
