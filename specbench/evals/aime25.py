"""AIME 2025: 30 contest problems, each with a whole number of 0 .. 999 as its answer.

Belongs here: where the problems come from, both prompts. Does not belong here: scoring (answers.py).

Data: eval.data=FILE.jsonl with rows {problem, answer, id?}, else math-ai/aime25 on the hub.

Protocols:
    chat         the problem as a user turn, with the instruction on a line of its own ("auto": reason step by step,
                 answer in \\boxed{})
    completion   "Question: p\\nAnswer:", as lm-eval's aime25
"""

from __future__ import annotations

from specbench.errors import UserError
from specbench.evals.gsm8k import COMPLETION_STOPS, ZERO_SHOT_INSTRUCTION, chat_messages, completion_prompt
from specbench.evals.hub import download_rows
from specbench.evals.rows import Row, read_rows
from specbench.evals.scorers import scorers_for
from specbench.evals.task import EvalModel, Sample, Task, fewer_samples_notice
from specbench.records import DataIdentity
from specbench.run_config import EvalConfig

HUB_DATASET = "math-ai/aime25"


def load_aime25(config: EvalConfig, model: EvalModel) -> Task:
    """The task; `model` makes no difference: no contest problems come with specbench."""
    if config.data is None:
        found = download_rows(
            HUB_DATASET, None, "test", 'give eval.data=FILE.jsonl with rows of "problem" and "answer"'
        )
        rows, path, sha256 = found.rows, None, found.sha256
    else:
        file = read_rows(config.data, "eval.data")
        rows, path, sha256 = file.rows, str(file.path), file.sha256
    available = [_sample(row, index, config) for index, row in enumerate(rows)]
    samples = tuple(available[: config.num_samples])
    data = DataIdentity("aime25", path, None, sha256, packaged=False, num_samples=len(samples))
    stop = config.stop if config.stop is not None else COMPLETION_STOPS if config.protocol == "completion" else ()
    notices = fewer_samples_notice(config.num_samples, len(available))
    return Task("aime25", data, samples, scorers_for(has_choices=False), config.scorer, stop, notices)


def _sample(row: Row, index: int, config: EvalConfig) -> Sample:
    problem, reference, sample_id = row.text("problem"), _answer(row), f"aime25-{index:02d}"
    if config.protocol == "completion":
        prompt = completion_prompt(problem, ())
        return Sample(sample_id, config.max_output_tokens, prompt=prompt, reference=reference)
    instruction = ZERO_SHOT_INSTRUCTION if config.instruction == "auto" else config.instruction
    messages = chat_messages(problem, (), instruction)
    return Sample(sample_id, config.max_output_tokens, messages=messages, reference=reference)


def _answer(row: Row) -> str:
    value = row.value.get("answer")
    text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdigit() and int(text) <= 999):
        raise UserError(f'{row.where}: "answer" must be a whole number of 0 .. 999, not {value!r}')
    return text
