"""Training documents and how they are packed into rows.

A document is one conversation (or one plain text), about a word problem or about a clip of audio; a row of
`ROW_LENGTH` token slots holds several documents, each blind to its neighbours. Made by a pool of processes, the same
rows for the same seed and counts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer

from specbench.engine.content import dmel
from tools.nano import listening
from tools.nano import tokenizer as special
from tools.nano.listening import Item, make_items
from tools.nano.problems import TRAIN_SEED, Problem, make_problem

ROW_LENGTH = 512
OPEN_ROWS = 16
PROBLEMS_PER_JOB = 4000
ITEMS_PER_JOB = 2000
GSM8K_SHARE = 0.04
AUDIO_FIRST_SHARE = 0.9

# Loss weight of a token, by the code stored beside it: padding, given text, the model's own text, audio.
PAD, GIVEN, OWN, HEARD = 0, 1, 2, 3
LOSS_WEIGHTS = (0.0, 0.15, 1.0, 0.0)

SYSTEM_TEXTS = (
    "You solve word problems.",
    "You are a careful assistant.",
    "Solve the problem step by step and end with #### and the number.",
)
TASK_TEXTS = (
    "\nSolve it step by step.",
    "\nPlease reason step by step. End with #### and the final number.",
    "\nGive the final answer after ####.",
)


@dataclass(frozen=True)
class Rows:
    """Packed training rows."""

    # [num_rows, ROW_LENGTH] int16
    tokens: np.ndarray
    # [num_rows, ROW_LENGTH] uint8: number of the document within its row from 1, 0 for padding
    documents: np.ndarray
    # [num_rows, ROW_LENGTH] uint8: PAD, GIVEN, OWN or HEARD
    codes: np.ndarray
    # [num_rows, ROW_LENGTH] int32: row of `bins` at an audio placeholder, else 0
    frames: np.ndarray
    # [1 + num_frames, bands] uint8: dMel levels; row 0 stands for no audio
    bins: np.ndarray
    # [num_clips] uint64: a clip each
    digests: np.ndarray

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Slots that hold a token."""
        return int((self.documents > 0).sum())


class Document:
    """Token ids and weight codes of one document under construction, and the audio in it if any."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.codes: list[int] = []
        # [frames, bands] uint8
        self.bins: np.ndarray | None = None
        self.digest = 0

    def add(self, text: str, code: int) -> None:
        """Appends encoded text; special strings inside become special tokens."""
        ids = self.tokenizer.encode(text).ids
        self.ids += ids
        self.codes += [code] * len(ids)

    def given_turn(self, role: str, text: str) -> None:
        self.add(f"{role}{special.CONTENT_TEXT}{text}{special.END_MESSAGE}", GIVEN)

    def audio_turn(self, item: Item) -> None:
        """The clip as a user's block: a mark, a placeholder a frame, the end."""
        self.bins, self.digest = clip_bins(item.clip), item.digest
        self.add(special.USER + special.AUDIO_MARK, GIVEN)
        self.ids += [self.tokenizer.token_to_id(special.AUDIO_PLACEHOLDER)] * len(self.bins)
        self.codes += [HEARD] * len(self.bins)
        self.add(special.AUDIO_END + special.END_MESSAGE, GIVEN)

    def model_turn(self, text: str) -> None:
        self.add(special.MODEL, GIVEN)
        self.add(f"{special.CONTENT_TEXT}{text}{special.END_MESSAGE}{special.END_SAMPLING}", OWN)


def clip_bins(clip: np.ndarray) -> np.ndarray:
    """[samples] int8 -> [frames, bands] uint8, as the engine makes them of the stored clip."""
    return dmel.features(clip.astype(np.float32) / 128.0)


def write_listening(rng: Random, tokenizer: Tokenizer, item: Item) -> Document:
    """One clip with its question in a drawn form; the clip mostly comes first."""
    document = Document(tokenizer)
    question = listening.prompt(item.row, rng.choices(listening.PROMPTS, [40, 20, 20, 20])[0])
    is_audio_first = rng.random() < AUDIO_FIRST_SHARE
    if is_audio_first:
        document.audio_turn(item)
    document.given_turn(special.USER, question)
    if not is_audio_first:
        document.audio_turn(item)
    document.model_turn(item.answer)
    return document


def write_document(rng: Random, tokenizer: Tokenizer, problem: Problem, shots: list[Problem]) -> Document:
    """One problem in a drawn format; most are a plain question and answer, some show solved examples first."""
    document = Document(tokenizer)
    kind = rng.choices(["plain", "headed", "task", "system", "shots_text", "shots_turns", "raw"],
                       [76, 5, 4, 3, 5, 4, 3])[0]  # fmt: skip
    question = problem["question"]
    if kind == "system":
        document.given_turn(special.SYSTEM, rng.choice(SYSTEM_TEXTS))
    if kind == "task":
        question += rng.choice(TASK_TEXTS)
    if kind == "headed":
        question = f"Question: {question}\nAnswer:"
    if kind == "shots_text":
        solved = "".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in shots)
        question = f"{solved}Question: {question}\nAnswer:"
    if kind == "shots_turns":
        for shot in shots:
            document.given_turn(special.USER, shot["question"])
            document.model_turn(shot["answer"])
    if kind == "raw":
        for shot in [*shots, problem]:
            document.add(f"Question: {shot['question']}\nAnswer:", GIVEN)
            document.add(f" {shot['answer']}\n\n", OWN)
        return document
    document.given_turn(special.USER, question)
    document.model_turn(problem["answer"])
    return document


def pack(documents: Iterator[Document]) -> Rows:
    """Puts each document into the fullest open row that still holds it; one longer than a row is dropped."""
    closed: list[list[Document]] = []
    rows: list[list[Document]] = []
    free: list[int] = []
    for document in documents:
        length = len(document.ids)
        if length > ROW_LENGTH:
            continue
        fitting = [row for row, space in enumerate(free) if space >= length]
        if fitting:
            row = min(fitting, key=free.__getitem__)
        else:
            if len(rows) == OPEN_ROWS:
                fullest = min(range(OPEN_ROWS), key=free.__getitem__)
                closed.append(rows.pop(fullest))
                free.pop(fullest)
            rows.append([])
            free.append(ROW_LENGTH)
            row = len(rows) - 1
        rows[row].append(document)
        free[row] -= length
    return _fill(closed + rows)


def _fill(rows: list[list[Document]]) -> Rows:
    """Lays out each row's documents one after another."""
    shape = (len(rows), ROW_LENGTH)
    heard = [document for documents in rows for document in documents if document.bins is not None]
    bins = [np.zeros((1, dmel.NUM_BANDS), np.uint8), *(document.bins for document in heard)]
    digests = np.array([document.digest for document in heard], np.uint64)
    tokens, documents_of, codes, frames = (np.zeros(shape, kind) for kind in (np.int16, np.uint8, np.uint8, np.int32))
    next_frame = 1
    for row, documents in enumerate(rows):
        start = 0
        for number, document in enumerate(documents, start=1):
            span = slice(start, start + len(document.ids))
            tokens[row, span], documents_of[row, span], codes[row, span] = document.ids, number, document.codes
            if document.bins is not None:
                places = start + np.flatnonzero(np.array(document.codes) == HEARD)
                frames[row, places] = np.arange(next_frame, next_frame + places.size)
                next_frame += places.size
            start = span.stop
    return Rows(tokens, documents_of, codes, frames, np.concatenate(bins), digests)


def joined(parts: list[Rows]) -> Rows:
    """All parts' rows in order; the first frame of every part's bins is the same empty one."""
    offsets = np.cumsum([0] + [len(part.bins) - 1 for part in parts])
    frames = [np.where(part.frames > 0, part.frames + offset, 0) for part, offset in zip(parts, offsets, strict=False)]
    return Rows(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "documents", "codes")),
        np.concatenate(frames).astype(np.int32),
        np.concatenate([parts[0].bins[:1], *(part.bins[1:] for part in parts)]),
        np.concatenate([part.digests for part in parts]),
    )


def read_gsm8k(path: Path) -> list[Problem]:
    """GSM8K rows with the calculator annotations taken out."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [Problem(question=row["question"], answer=re.sub(r"<<.*?>>", "", row["answer"])) for row in rows]


_worker_tokenizer: Tokenizer
_worker_gsm8k: list[Problem]


def _start_worker(tokenizer_json: str, gsm8k: list[Problem]) -> None:
    global _worker_tokenizer, _worker_gsm8k
    _worker_tokenizer, _worker_gsm8k = Tokenizer.from_str(tokenizer_json), gsm8k


def _start_pooled(tokenizer_json: str, gsm8k: list[Problem]) -> None:
    os.nice(10)
    torch.set_num_threads(1)
    _start_worker(tokenizer_json, gsm8k)


def _documents(job: int, count: int = PROBLEMS_PER_JOB) -> Iterator[Document]:
    rng = Random(f"documents/{job}")
    first = job * PROBLEMS_PER_JOB
    for index in range(first, first + count):
        problem = make_problem(TRAIN_SEED, index)
        shots = [make_problem(TRAIN_SEED, rng.randrange(first, first + PROBLEMS_PER_JOB)) for _ in range(2)]
        if _worker_gsm8k and rng.random() < GSM8K_SHARE:
            problem = rng.choice(_worker_gsm8k)
        yield write_document(rng, _worker_tokenizer, problem, shots[: rng.randint(1, 2)])


def _listening(job: int, count: int = ITEMS_PER_JOB) -> Iterator[Document]:
    rng = Random(f"listening documents/{job}")
    for item in make_items(listening.TRAIN_SEED, count, job * ITEMS_PER_JOB):
        yield write_listening(rng, _worker_tokenizer, item)


def _make_job(job: tuple[str, int]) -> Rows:
    kind, number = job
    return pack(_listening(number) if kind == "listening" else _documents(number))


def make_rows(tokenizer: Tokenizer, gsm8k: list[Problem], num_problems: int, num_items: int = 0) -> Rows:
    """A few rows made in this process, to compile and warm up on."""
    _start_worker(tokenizer.to_str(), gsm8k)
    texts = (document for _, document in zip(range(num_problems), _documents(0), strict=False))
    return joined([pack(texts), pack(_listening(0, num_items))] if num_items else [pack(texts)])


class RowFactory:
    """A pool of processes that makes rows while the caller does something else."""

    def __init__(
        self, tokenizer: Tokenizer, gsm8k: list[Problem], num_problems: int, num_items: int, num_workers: int
    ) -> None:
        # Spawned, not forked: the caller may have started CUDA or threads. They give way to its compilers.
        context = multiprocessing.get_context("spawn")
        self.pool = context.Pool(num_workers, _start_pooled, (tokenizer.to_str(), gsm8k))
        jobs = [("listening", number) for number in range(-(-num_items // ITEMS_PER_JOB))]
        jobs += [("problems", number) for number in range(-(-num_problems // PROBLEMS_PER_JOB))]
        self.results = self.pool.imap(_make_job, jobs)

    def collect(self) -> Rows:
        """Waits for all rows."""
        parts = list(self.results)
        self.pool.close()
        self.pool.join()
        return joined(parts)


def tokenizer_texts(gsm8k: list[Problem], num_problems: int = 8000) -> Iterator[str]:
    """What the tokenizer learns from: made-up problems, and GSM8K rows if there are any."""
    for index in range(num_problems):
        problem = make_problem(TRAIN_SEED, index)
        yield f"{problem['question']}\n{problem['answer']}"
    for problem in gsm8k:
        yield f"Question: {problem['question']}\nAnswer: {problem['answer']}"
