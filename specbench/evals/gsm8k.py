"""GSM8K: grade-school word problems with one number as the answer.

Belongs here: where the problems come from, both prompts, the reference answers. Does not belong here: scoring
(answers.py), chat templates (the target renders messages).

Data, in this order: eval.data=FILE.jsonl; the packaged problems, when the packaged model runs (they are made up, and
called nano_problems); openai/gsm8k on the hub. Shots are the first rows of the training file, never of the test file.

Protocols:
    chat         shots as user and assistant turns, then the question as a user turn with the instruction on a line of
                 its own. "auto" is the usual zero-shot instruction for a real model, and the bare question for the
                 packaged one, which was trained on bare questions, and after shots, whose answers show the form.
    completion   "Question: q\\nAnswer: a\\n\\n" for each shot, then "Question: q\\nAnswer:", as vLLM's and SGLang's
                 scripts have it. It takes no instruction.
Shots keep the calculator annotations of their answers ("<<48/2=24>>"), as those scripts do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specbench.errors import UserError
from specbench.evals.answers import SCORERS
from specbench.evals.hub import download_rows
from specbench.evals.rows import Row, read_rows
from specbench.evals.task import EvalModel, Sample, Task, fewer_samples_notice
from specbench.generate import Message
from specbench.records import DataIdentity
from specbench.run_config import EvalConfig

PACKAGED_PROBLEMS = Path(__file__).parent.parent / "assets" / "nano_problems"
PACKAGED_NAME = "nano_problems"
PACKAGED_NOTICE = f"{PACKAGED_NAME}: made-up problems that come with specbench, not GSM8K"
HUB_DATASET, HUB_CONFIG = "openai/gsm8k", "main"

ZERO_SHOT_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
COMPLETION_STOPS = ("Question", "Assistant:", "<|separator|>")

_REFERENCE = re.compile(r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*$")


@dataclass(frozen=True, slots=True)
class Problem:
    """One row: its question, its worked answer and the number behind "####"."""

    question: str
    answer: str
    reference: str


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """Problems and where they are from."""

    problems: tuple[Problem, ...]
    path: Path | None
    sha256: str
    is_packaged: bool

    @property
    def name(self) -> str:
        return PACKAGED_NAME if self.is_packaged else "gsm8k"


def load_gsm8k(config: EvalConfig, model: EvalModel) -> Task:
    """The task, with everything that could be wrong with its data found now."""
    if config.protocol == "completion" and config.instruction not in (None, "auto"):
        raise UserError("eval.instruction: eval.protocol=completion takes none: leave it null or say protocol=chat")
    available = _test_problems(config, model)
    shots = _shots(config, available)
    problems = available.problems[: config.num_samples]
    samples = tuple(
        _sample(f"{available.name}-{index:04d}", problem, shots, config, model)
        for index, problem in enumerate(problems)
    )
    data = DataIdentity(
        name=available.name,
        path=None if available.path is None else str(available.path),
        revision=None,
        sha256=available.sha256,
        packaged=available.is_packaged,
        num_samples=len(samples),
    )
    return Task("gsm8k", data, samples, tuple(SCORERS), config.scorer, _stops(config), _notices(config, available))


def _sample(
    sample_id: str, problem: Problem, shots: tuple[Problem, ...], config: EvalConfig, model: EvalModel
) -> Sample:
    if config.protocol == "completion":
        prompt = completion_prompt(problem.question, shots)
        return Sample(sample_id, config.max_output_tokens, prompt=prompt, reference=problem.reference)
    instruction = config.instruction
    if instruction == "auto":
        instruction = None if model.is_packaged or shots else ZERO_SHOT_INSTRUCTION
    messages = chat_messages(problem.question, shots, instruction)
    return Sample(sample_id, config.max_output_tokens, messages=messages, reference=problem.reference)


def completion_prompt(question: str, shots: tuple[Problem, ...]) -> str:
    worked = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)
    return f"{worked}Question: {question}\nAnswer:"


def chat_messages(question: str, shots: tuple[Problem, ...], instruction: str | None) -> tuple[Message, ...]:
    ending = "" if not instruction else f"\n{instruction}"
    messages: list[Message] = []
    for shot in shots:
        messages.append({"role": "user", "content": shot.question + ending})
        messages.append({"role": "assistant", "content": shot.answer})
    messages.append({"role": "user", "content": question + ending})
    return tuple(messages)


def _stops(config: EvalConfig) -> tuple[str, ...]:
    if config.stop is not None:
        return config.stop
    return COMPLETION_STOPS if config.protocol == "completion" else ()


def _notices(config: EvalConfig, available: ProblemSet) -> tuple[str, ...]:
    fewer = fewer_samples_notice(config.num_samples, len(available.problems))
    if not available.is_packaged:
        return fewer
    return (PACKAGED_NOTICE, *fewer)


def _test_problems(config: EvalConfig, model: EvalModel) -> ProblemSet:
    if config.data is not None:
        return _read_problems(config.data, "eval.data")
    if model.is_packaged:
        return _read_problems(PACKAGED_PROBLEMS / "test.jsonl", "the packaged problems")
    return _download_problems("test", "eval.data")


def _shots(config: EvalConfig, test: ProblemSet) -> tuple[Problem, ...]:
    """The first eval.num_fewshot training rows."""
    if not config.num_fewshot:
        return ()
    training = _training_problems(config, test)
    if len(training.problems) < config.num_fewshot:
        raise UserError(
            f"eval.num_fewshot: {config.num_fewshot} shots asked for, the training rows are {len(training.problems)}; "
            "ask for fewer"
        )
    shots = training.problems[: config.num_fewshot]
    asked = {problem.question for problem in test.problems}
    if any(shot.question in asked for shot in shots):
        raise UserError(f"eval.fewshot_data: {training.path} has problems of the test data: give training rows instead")
    return shots


def _training_problems(config: EvalConfig, test: ProblemSet) -> ProblemSet:
    if config.fewshot_data is not None:
        return _read_problems(config.fewshot_data, "eval.fewshot_data")
    if test.is_packaged:
        return _read_problems(PACKAGED_PROBLEMS / "train.jsonl", "the packaged problems")
    if config.data is not None:
        raise UserError("eval.num_fewshot: eval.data comes without training rows: give eval.fewshot_data=FILE.jsonl")
    return _download_problems("train", "eval.fewshot_data")


def _read_problems(path: str | Path, key: str) -> ProblemSet:
    file = read_rows(path, key)
    is_packaged = file.path.resolve().parent == PACKAGED_PROBLEMS.resolve()
    return ProblemSet(tuple(_problem(row) for row in file.rows), file.path, file.sha256, is_packaged)


def _download_problems(split: str, key: str) -> ProblemSet:
    found = download_rows(HUB_DATASET, HUB_CONFIG, split, f"give {key}=FILE.jsonl")
    return ProblemSet(tuple(_problem(row) for row in found.rows), None, found.sha256, is_packaged=False)


def _problem(row: Row) -> Problem:
    question, answer = row.text("question"), row.text("answer")
    found = _REFERENCE.search(answer)
    if found is None:
        raise UserError(f'{row.where}: "answer" does not end in "#### N", the number that is right')
    return Problem(question, answer, found[1])
