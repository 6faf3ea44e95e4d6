"""SPEED-Bench: prompts of eleven kinds, and prompts of nominal lengths in three tiers of entropy.

Belongs here: the layouts in which the resolved set is kept, its shape, and cutting prompts to length. Does not belong
here: the set itself, which may not be passed on; prompts of our own (fixed_length.py), which run in its place with the
packaged model, under their own name.

eval.data is a file or a folder of the set as its own tools leave it: FOLDER/CONFIG/test.parquet (also below speed/), a
parquet file of the hub's layout, or FOLDER/CONFIG.jsonl with "turns" or "messages". What the hub holds of it has
placeholders for text that must be fetched from its sources: such rows are refused.

Lengths. CONFIG's are nominal: "8k" is 8,000 tokens of another tokenizer, without template. eval.truncate=true cuts the
rendered prompt to exactly eval.isl tokens of the model's own; shorter ones stay as they are and are counted. Prompts of
throughput configurations are answered with exactly eval.osl tokens (ignore_eos), qualitative ones with at most so many.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import UserError, near_name
from specbench.evals.exact_prompts import PromptFrame, check_room
from specbench.evals.fixed_length import load_fixed_length
from specbench.evals.in_turns import in_turns
from specbench.evals.rows import Row, read_rows
from specbench.evals.task import EvalModel, Sample, Task, fewer_samples_notice
from specbench.records import DataIdentity
from specbench.run_config import QUALITATIVE, EvalConfig

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
TIERS = ("low_entropy", "mixed", "high_entropy")
TOPICS = (
    "coding",
    "humanities",
    "math",
    "multilingual",
    "qa",
    "rag",
    "reasoning",
    "roleplay",
    "stem",
    "summarization",
    "writing",
)
ROWS_A_TOPIC, ROWS_A_TIER = 80, 512


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row: what the user says, turn by turn."""

    sample_id: str
    category: str
    turns: tuple[str, ...]


def load_speed_bench(config: EvalConfig, model: EvalModel) -> Task:
    """The task; with the packaged model and no data, prompts of our own of the same lengths."""
    if config.source_config is None or config.osl is None:
        raise UserError("eval.source_config: say which configuration, such as throughput_8k, and eval.osl")
    if config.data is None:
        return _own_prompts(config, model)
    is_qualitative = config.source_config == QUALITATIVE
    path = _find_file(Path(config.data), config.source_config)
    prompts = _read_prompts(path)
    sha256 = _content_sha256(prompts)
    if config.sha256 is not None and config.sha256 != sha256:
        raise UserError(f"eval.sha256: the content of {path} has {sha256}, not {config.sha256}: it is another set")
    chosen = in_turns(_of_categories(prompts, config.categories), lambda prompt: prompt.category)[: config.num_samples]
    samples, cut_notices = _cut(chosen, config, model) if config.truncate else (_whole(chosen, config.osl), [])
    notices = [
        *fewer_samples_notice(config.num_samples, len(chosen)),
        *_shape_notices(prompts, config.source_config, is_qualitative),
        *cut_notices,
        f"content of {config.source_config} ({len(prompts):,} rows): sha256 {sha256}",
    ]
    data = DataIdentity(
        f"speed_bench_{config.source_config}", str(path), None, sha256, packaged=False, num_samples=len(chosen)
    )
    return Task("speed_bench", data, tuple(samples), (), None, config.stop or (), tuple(notices))


def _own_prompts(config: EvalConfig, model: EvalModel) -> Task:
    if not model.is_packaged:
        raise UserError(
            "eval.data: SPEED-Bench does not come with specbench: resolve it with its own tools where its sources can "
            "be reached and give the folder, or say eval=fixed_length for home-made prompts of exact lengths"
        )
    if config.source_config == QUALITATIVE:
        raise UserError("eval.data: no qualitative prompts come with specbench; give the folder of the resolved set")
    flavours = None if config.categories is None else tuple(name for name in config.categories if name != "mixed")
    task = load_fixed_length(dataclasses.replace(config, categories=flavours), model)
    notice = f"{task.data.name}: home-made prompts of exact lengths, not SPEED-Bench; give eval.data=DIR"
    return dataclasses.replace(task, data=dataclasses.replace(task.data, packaged=True), notices=(notice,))


# ---- Reading


def _find_file(path: Path, source_config: str) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"eval.data: {path} does not exist; give the folder or the file of the resolved set")
    places = [
        path / source_config / "test.parquet",
        path / "speed" / source_config / "test.parquet",
        path / source_config / "test-00000-of-00001.parquet",
        path / f"{source_config}.jsonl",
        path / source_config / "test.jsonl",
    ]
    if path.name == source_config:
        places += [path / "test.parquet", path / "test-00000-of-00001.parquet", path / "test.jsonl"]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        looked_for = ", ".join(str(place.relative_to(path)) for place in places)
        raise UserError(f"eval.data: {path} holds no {source_config}: looked for {looked_for}")
    return found


def _read_prompts(path: Path) -> tuple[Prompt, ...]:
    rows = _parquet_rows(path) if path.suffix == ".parquet" else list(read_rows(path, "eval.data").rows)
    if not rows:
        raise UserError(f"eval.data: {path} holds no rows")
    prompts = tuple(_prompt(row, index) for index, row in enumerate(rows))
    masked = [prompt for prompt in prompts if any(PLACEHOLDER in turn for turn in prompt.turns)]
    if masked:
        raise UserError(
            f"eval.data: {len(masked)} of {len(prompts)} rows of {path} are placeholders, such as "
            f"{masked[0].sample_id}: their text must be fetched from its sources with SPEED-Bench's own tools (prepare "
            "the whole configuration, then give its folder)"
        )
    taken = Counter(prompt.sample_id for prompt in prompts)
    if (most := taken.most_common(1)[0])[1] > 1:
        raise UserError(f"eval.data: {path} has the question_id {most[0]!r} {most[1]} times")
    return prompts


def _parquet_rows(path: Path) -> list[Row]:
    """pyarrow alone: what other libraries wrote about features into the file is not needed, and may not be readable."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        values = pq.ParquetFile(path).read().to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"eval.data: {path} cannot be read as parquet ({error})") from error
    return [Row(f"{path} row {number}", value) for number, value in enumerate(values, start=1)]


def _prompt(row: Row, index: int) -> Prompt:
    turns = _turns(row)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UserError(f'{row.where}: each row needs "turns", a list of texts, or "messages" with a user\'s text')
    sample_id = row.value.get("question_id", f"row-{index:04d}")
    category = row.value.get("category")
    return Prompt(str(sample_id), str(category or "unnamed"), tuple(row.checked(turn) for turn in turns))


def _turns(row: Row) -> list[Any]:
    turns, messages = row.value.get("turns"), row.value.get("messages")
    if isinstance(turns, list):
        return turns
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return []
    return [message.get("content") for message in messages if message.get("role") == "user"]


def _content_sha256(prompts: Iterable[Prompt]) -> str:
    """The same for the same rows in any layout."""
    content = [[prompt.sample_id, prompt.category, prompt.turns] for prompt in prompts]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


# ---- Choosing


def _of_categories(prompts: Sequence[Prompt], categories: Sequence[str] | None) -> list[Prompt]:
    known = {prompt.category for prompt in prompts}
    for category in categories or ():
        if category not in known:
            raise UserError(f"eval.categories: unknown category {category!r}: {near_name(category, known)}")
    return [prompt for prompt in prompts if categories is None or prompt.category in categories]


def _whole(prompts: Iterable[Prompt], osl: int) -> list[Sample]:
    """Every turn as it stands; a later one follows the model's own answer to the one before it."""
    return [
        Sample(
            prompt.sample_id, osl, messages=({"role": "user", "content": text},), turn=turn, category=prompt.category
        )
        for prompt in prompts
        for turn, text in enumerate(prompt.turns)
    ]


def _cut(prompts: Sequence[Prompt], config: EvalConfig, model: EvalModel) -> tuple[list[Sample], list[str]]:
    """First turns of exactly eval.isl tokens, shorter ones as they are."""
    assert config.isl is not None and config.osl is not None
    check_room(config.isl, config.osl, model)
    frame = PromptFrame.of(model.load_tokenizer(), config.protocol)
    samples, num_shorter, shortest = [], 0, config.isl
    for prompt in prompts:
        ids = frame.text_ids(prompt.turns[0])
        num_tokens = frame.num_tokens(ids)
        if num_tokens < config.isl:
            num_shorter, shortest = num_shorter + 1, min(shortest, num_tokens)
        token_ids = frame.exactly(min(config.isl, num_tokens), ids)
        samples.append(Sample(prompt.sample_id, config.osl, prompt_token_ids=token_ids, category=prompt.category))
    notices = []
    if num_shorter:
        notices.append(
            f"{num_shorter} of {len(prompts)} prompts are shorter than eval.isl={config.isl} (the shortest has "
            f"{shortest} tokens) and stay so: a longer eval.source_config fills them"
        )
    if num_talks := sum(len(prompt.turns) > 1 for prompt in prompts):
        notices.append(f"{num_talks} prompts have further turns, which eval.truncate=true leaves out")
    return samples, notices


def _shape_notices(prompts: Sequence[Prompt], source_config: str, is_qualitative: bool) -> list[str]:
    """Where the file is not the whole published configuration."""
    names, rows_each = (TOPICS, ROWS_A_TOPIC) if is_qualitative else (TIERS, ROWS_A_TIER)
    counts = Counter(prompt.category for prompt in prompts)
    if counts == dict.fromkeys(names, rows_each):
        return []
    found = ", ".join(f"{name} {counts[name]}" for name in sorted(counts))
    return [
        f"not the whole of {source_config}: {len(prompts):,} rows ({found}), published are {rows_each * len(names):,} "
        f"({rows_each} each of {', '.join(names)})"
    ]
