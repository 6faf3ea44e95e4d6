"""MT-Bench: 80 questions of two turns in eight categories.

Belongs here: where the questions come from. Does not belong here: their layout (question_turns.py).

Data: eval.data=FILE.jsonl (question.jsonl of FastChat's llm_judge), else HuggingFaceH4/mt_bench_prompts on the hub.
"""

from __future__ import annotations

from specbench.evals.hub import download_rows
from specbench.evals.question_turns import chosen_questions, question_samples, read_questions
from specbench.evals.rows import Row, read_rows
from specbench.evals.task import EvalModel, Task, fewer_samples_notice
from specbench.records import DataIdentity
from specbench.run_config import EvalConfig

HUB_DATASET = "HuggingFaceH4/mt_bench_prompts"


def load_mt_bench(config: EvalConfig, model: EvalModel) -> Task:
    """The task; `model` makes no difference: no conversations come with specbench."""
    if config.data is None:
        found = download_rows(HUB_DATASET, None, "train", "give eval.data=FILE.jsonl, FastChat's question.jsonl")
        rows, path, sha256 = tuple(map(_in_own_layout, found.rows)), None, found.sha256
    else:
        file = read_rows(config.data, "eval.data")
        rows, path, sha256 = file.rows, str(file.path), file.sha256
    return question_task("mt_bench", rows, DataIdentity("mt_bench", path, None, sha256, packaged=False), config)


def question_task(name: str, rows: tuple[Row, ...], data: DataIdentity, config: EvalConfig) -> Task:
    """The conversations that `config` chooses among `rows`; `data` lacks their number alone."""
    questions = read_questions(rows)
    every = chosen_questions(questions, config.categories, None)
    chosen = every[: config.num_samples]
    samples = [sample for one in chosen for sample in question_samples(one, name, config.max_output_tokens)]
    notices = fewer_samples_notice(config.num_samples, len(every))
    identity = DataIdentity(data.name, data.path, data.revision, data.sha256, data.packaged, len(chosen))
    return Task(name, identity, tuple(samples), (), None, config.stop or (), notices)


def _in_own_layout(row: Row) -> Row:
    """The hub's columns under FastChat's names."""
    value = row.value
    renamed = {"question_id": value.get("prompt_id"), "turns": value.get("prompt"), "category": value.get("category")}
    return Row(row.where, renamed | {"reference": value.get("reference")})
