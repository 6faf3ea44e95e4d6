"""MMAU: questions with choices about clips of music, sound and speech.

Belongs here: where questions and clips come from, what is asked, and by what accuracy is grouped. Does not belong here:
scoring (choices.py), decoding a clip (the target: one that can't be heard is a failed request and a wrong answer).

Data, in this order: eval.data=FILE (a JSON array as in the repository of MMAU, or JSON lines) with the clips below
eval.audio=DIR, by default the file's folder; the packaged questions, when the packaged model runs (made up, and called
nano_audio); gamma-lab-umd/MMAU-test-mini on the hub, which holds the clips, too.

Prompts (eval.prompt), each behind the clip in one user turn:
    official   the authors' best; choices as Python prints the list
    options    "Please choose the answer from the following options: ..."
    letters    a line for each choice, "(A) ..."
    or any text that holds {question} and one of {choices} and {lettered_choices}; \\n in it is a line end
Published figures of one model differ by over 20 points with the scorer, and a quarter of the questions was revised in
v05.15.25: scorer, prompt and version belong to every figure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import UserError, near_name
from specbench.evals.choices import CHOICE_SCORERS, LETTERS
from specbench.evals.hub import without_warnings
from specbench.evals.in_turns import in_turns
from specbench.evals.rows import Row, RowFile, read_json_rows
from specbench.evals.task import EvalModel, Sample, Task, fewer_samples_notice
from specbench.generate import AudioSource
from specbench.records import DataIdentity
from specbench.run_config import EvalConfig

PACKAGED_QUESTIONS = Path(__file__).parent.parent / "assets" / "nano_audio" / "questions.json"
PACKAGED_NAME = "nano_audio"
HUB_DATASET = "gamma-lab-umd/MMAU-test-mini"

PROMPTS = {
    "official": "{question}  Select one option from the provided choices.\n{choices}.",
    "options": "{question} Please choose the answer from the following options: {choices}.",
    "letters": "{question}\n{lettered_choices}\nAnswer with one of the choices.",
}
#: sha256 of a question file -> its version.
KNOWN_VERSIONS = {"9f18fda99f8dbc2bc5ecd6323fb5063309f54969810b5c6f1caeb3b8d904cf1c": "v05.15.25"}
#: Key of a row -> dimension of the report, in the order of the report.
DIMENSIONS = {"task": "task", "difficulty": "difficulty", "category": "category", "sub-category": "sub_category"}

_FIELD = re.compile(r"\{(question|choices|lettered_choices)\}")
#: How the hub's copy marks its choices.
_LETTER_MARK = re.compile(r"^\([A-Z]\)\s+")
_NUM_NAMED = 3


@dataclass(frozen=True, slots=True)
class Question:
    """One row."""

    sample_id: str
    text: str
    choices: tuple[str, ...]
    #: None where answers are not published.
    answer: str | None
    groups: Mapping[str, str]
    #: Bytes where the data holds them.
    clip: AudioSource


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions and where they are from."""

    questions: tuple[Question, ...]
    path: Path | None
    #: Of the questions alone.
    sha256: str
    #: None for a file of no known release.
    version: str | None
    is_packaged: bool

    @property
    def name(self) -> str:
        return PACKAGED_NAME if self.is_packaged else "mmau"


def load_mmau(config: EvalConfig, model: EvalModel) -> Task:
    """The task, with everything that could be wrong with its data found now; a clip that is missing is a notice."""
    template = _template(config.prompt or "official")
    available = _of_tasks(_find_questions(config, model), config.tasks)
    questions = _first(available.questions, config.num_samples)
    samples = tuple(
        Sample(
            question.sample_id,
            config.max_output_tokens,
            messages=({"role": "user", "content": _filled(template, question)},),
            reference=question.answer,
            category=question.groups.get("task"),
            audio=(question.clip,),
            choices=question.choices,
            groups=question.groups,
        )
        for question in questions
    )
    data = DataIdentity(
        name=available.name,
        path=None if available.path is None else str(available.path),
        revision=available.version,
        sha256=_sha256(available.sha256, questions),
        packaged=available.is_packaged,
        num_samples=len(samples),
    )
    notices = tuple(_notices(config, available, questions))
    return Task("mmau", data, samples, tuple(CHOICE_SCORERS), config.scorer, config.stop or (), notices)


# ---- What is asked


def _template(prompt: str) -> str:
    template = PROMPTS.get(prompt, prompt.replace("\\n", "\n"))  # a command line has no line ends
    fields = set(_FIELD.findall(template))
    if "{" not in prompt and prompt not in PROMPTS:
        raise UserError(f"eval.prompt: unknown prompt {prompt!r}: {near_name(prompt, PROMPTS)}")
    if "question" not in fields or len(fields) < 2:
        raise UserError("eval.prompt: a text of your own needs {question} and {choices} or {lettered_choices}")
    return template


def _filled(template: str, question: Question) -> str:
    lettered = "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, question.choices, strict=False))
    values = {"question": question.text, "choices": str(list(question.choices)), "lettered_choices": lettered}
    return _FIELD.sub(lambda field: values[field[1]], template)


# ---- Where it comes from


def _find_questions(config: EvalConfig, model: EvalModel) -> QuestionSet:
    if config.data is not None:
        return _read_questions(Path(config.data), "eval.data", config.audio)
    if config.audio is not None:
        raise UserError("eval.audio: these clips need their questions; give eval.data=FILE, too")
    if model.is_packaged:
        if not PACKAGED_QUESTIONS.is_file():
            raise UserError("eval=mmau: no questions come with this model; give eval.data=FILE and eval.audio=DIR")
        return _read_questions(PACKAGED_QUESTIONS, "the packaged questions", None)
    return _download_questions(config.revision)


def _read_questions(path: Path, key: str, audio: str | None) -> QuestionSet:
    file = read_json_rows(path, key)
    folder = file.path.parent if audio is None else Path(audio)
    if not folder.is_dir():
        raise UserError(f"eval.audio: {folder} is not a folder; give the one that holds the clips")
    is_packaged = file.path.resolve() == PACKAGED_QUESTIONS.resolve()
    questions = _questions(file, lambda row: _find_clip(folder, row.text("audio_id")))
    if not any(isinstance(one.clip, Path) and one.clip.is_file() for one in questions):
        example = file.rows[0].text("audio_id")
        raise UserError(
            f"eval.audio: none of the {len(questions)} clips of {path} is in {folder}, such as {example}; give "
            "eval.audio=DIR"
        )
    version = KNOWN_VERSIONS.get(file.sha256)
    return QuestionSet(questions, file.path, file.sha256, PACKAGED_NAME if is_packaged else version, is_packaged)


def _find_clip(folder: Path, audio_id: str) -> Path:
    """As the row says below `folder`, else by its name alone; the first of the two where neither is there."""
    path = folder / audio_id
    by_name = folder / Path(audio_id).name
    return by_name if not path.is_file() and by_name.is_file() else path


def _download_questions(revision: str | None) -> QuestionSet:
    import datasets  # slow to import, and not needed with a file

    try:
        with without_warnings():
            table = datasets.load_dataset(HUB_DATASET, split="test", revision=revision)
        table = table.cast_column("context", datasets.Audio(decode=False))
    except Exception as error:  # the library raises a type of its own for each way to fail
        raise UserError(
            f"eval=mmau: can't get {HUB_DATASET} from the hub ({type(error).__name__}): give eval.data=FILE and "
            "eval.audio=DIR"
        ) from error
    clips: dict[str, bytes] = {}
    rows = []
    for index, value in enumerate(table):
        row = Row(f"{HUB_DATASET} row {index}", _row_of_hub(dict(value)))
        clips[row.text("id")] = value["context"]["bytes"] or b""
        rows.append(row)
    content = "".join(json.dumps(row.value, sort_keys=True) + "\n" for row in rows)
    file = RowFile(Path(HUB_DATASET), hashlib.sha256(content.encode()).hexdigest(), tuple(rows))
    questions = _questions(file, lambda row: clips[row.text("id")])
    return QuestionSet(questions, None, file.sha256, revision or "main of the hub", is_packaged=False)


def _row_of_hub(value: dict[str, Any]) -> dict[str, Any]:
    """One row of the hub's copy under the keys of the repository's file; there choices begin with "(A) "."""
    more = value.get("other_attributes") or {}
    attributes = json.loads(more) if isinstance(more, str) else dict(more)
    choices = [_LETTER_MARK.sub("", choice) for choice in value["choices"]]
    answer = _LETTER_MARK.sub("", value["answer"]) if value.get("answer") else None
    return attributes | {"question": value["instruction"], "choices": choices, "answer": answer}


def _questions(file: RowFile, clip: Callable[[Row], AudioSource]) -> tuple[Question, ...]:
    first: dict[str, str] = {}
    questions = []
    for row in file.rows:
        question = _question(row, clip)
        if question.sample_id in first:
            raise UserError(f"{row.where}: the id {question.sample_id!r} is taken by {first[question.sample_id]}")
        first[question.sample_id] = row.where
        questions.append(question)
    return tuple(questions)


def _question(row: Row, clip: Callable[[Row], AudioSource]) -> Question:
    choices = row.value.get("choices")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise UserError(f'{row.where}: "choices" must be a list of at least two texts')
    if len(choices) > len(LETTERS):
        raise UserError(f'{row.where}: "choices" has {len(choices)} entries, more than there are letters')
    groups = {name: value for key, name in DIMENSIONS.items() if (value := _group(row, key)) is not None}
    return Question(
        sample_id=row.text("id"),
        text=row.text("question"),
        choices=tuple(row.checked(choice) for choice in choices),
        answer=None if row.value.get("answer") is None else row.text("answer"),
        groups=groups,
        clip=clip(row),
    )


def _group(row: Row, key: str) -> str | None:
    """The value of a dimension; some rows have a list with one."""
    value = row.value.get(key)
    parts = value if isinstance(value, list) else [value]
    return "/".join(part for part in parts if isinstance(part, str)) or None


def _of_tasks(available: QuestionSet, tasks: Sequence[str] | None) -> QuestionSet:
    if tasks is None:
        return available
    known = {question.groups.get("task", "") for question in available.questions}
    for task in tasks:
        if task not in known:
            raise UserError(f"eval.tasks: unknown task {task!r}: {near_name(task, known)}")
    chosen = tuple(question for question in available.questions if question.groups.get("task") in tasks)
    return QuestionSet(chosen, available.path, available.sha256, available.version, available.is_packaged)


def _first(questions: tuple[Question, ...], count: int | None) -> tuple[Question, ...]:
    """All as they stand; of fewer the tasks in turn, for the file has them one behind the other."""
    if count is None or count >= len(questions):
        return questions
    return tuple(in_turns(questions, lambda question: question.groups.get("task", ""))[:count])


# ---- What is said about it


def _sha256(of_questions: str, questions: Sequence[Question]) -> str:
    """Of the questions and of every clip that is there."""
    total = hashlib.sha256(of_questions.encode())
    for question in questions:
        total.update(hashlib.sha256(_content(question.clip)).digest())
    return total.hexdigest()


def _content(clip: AudioSource) -> bytes:
    """The bytes of a clip; none where it can't be read."""
    if isinstance(clip, bytes):
        return clip
    try:
        return clip.read_bytes()
    except OSError:
        return b""


def _notices(config: EvalConfig, available: QuestionSet, questions: Sequence[Question]) -> list[str]:
    notices = list(fewer_samples_notice(config.num_samples, len(available.questions)))
    if available.is_packaged:
        notices.insert(0, f"{PACKAGED_NAME}: made-up sounds and questions that come with specbench, not MMAU")
    missing = [str(one.clip) for one in questions if isinstance(one.clip, Path) and not one.clip.is_file()]
    if missing:
        named = ", ".join(missing[:_NUM_NAMED]) + (", …" if len(missing) > _NUM_NAMED else "")
        notices.append(f"{len(missing)} of {len(questions)} clips are missing; their answers count as wrong: {named}")
    outside = sum(one.answer is not None and one.answer not in one.choices for one in questions)
    if outside:
        notices.append(f"{outside} answers are none of their choices, which no answer can match: an older MMAU?")
    unanswered = sum(one.answer is None for one in questions)
    if unanswered:
        notices.append(f"{unanswered} questions come without an answer and are not scored")
    return notices
