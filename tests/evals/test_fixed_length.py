"""Home-made prompts: their length in tokens is exact, they differ from the first block on, flavours differ in kind."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from specbench.engine.tokenizer import load_tokenizer
from specbench.errors import UserError
from specbench.evals.exact_prompts import PromptFrame
from specbench.evals.registry import load_task
from specbench.evals.task import EvalModel, Task, measured_requests
from specbench.model_choice import PACKAGED_CHECKPOINT
from specbench.run_config import EvalConfig, SamplingConfig
from tests.evals.letter_tokenizer import LetterTokenizer

Build = Callable[..., EvalConfig]
LETTERS = EvalModel(is_packaged=False, max_model_len=4096, load_tokenizer=LetterTokenizer)


@pytest.fixture(scope="module")
def packaged() -> EvalModel:
    tokenizer = load_tokenizer(PACKAGED_CHECKPOINT)
    assert tokenizer is not None
    return EvalModel(is_packaged=True, max_model_len=2048, load_tokenizer=lambda: tokenizer)


@pytest.fixture
def build(eval_config: Build) -> Build:
    defaults = {"name": "fixed_length", "scorer": None, "isl": 300, "osl": 50, "max_output_tokens": 50}
    return lambda **changes: eval_config(**({"num_samples": 6} | defaults | changes))


def prompts(task: Task) -> list[tuple[int, ...]]:
    return [sample.prompt_token_ids or () for sample in task.samples]


@pytest.mark.parametrize("protocol", ["chat", "completion"])
@pytest.mark.parametrize("isl", [60, 333, 1500])
def test_lengths_are_exact(
    build: Build, packaged: EvalModel, sampling: SamplingConfig, isl: int, protocol: str
) -> None:
    task = load_task(build(isl=isl, protocol=protocol), packaged)
    assert [len(ids) for ids in prompts(task)] == [isl] * 6
    assert {request.sampling.max_output_tokens for request in measured_requests(task, sampling)} == {50}
    assert task.data.name == f"fixed_length_{isl}_50" and not task.data.packaged and task.notices == ()
    assert load_task(build(isl=isl, protocol=protocol), packaged) == task


def test_prompts_differ_early_and_flavours_in_kind(build: Build, packaged: EvalModel) -> None:
    task = load_task(build(isl=1200), packaged)
    assert [sample.category for sample in task.samples] == ["low_entropy", "high_entropy"] * 3
    frame = PromptFrame.of(packaged.load_tokenizer(), "chat")
    beginnings = {ids[: len(frame.before) + 16] for ids in prompts(task)}
    assert len(beginnings) == 6
    texts = [packaged.load_tokenizer().decode(ids) for ids in prompts(task)]
    shares = [len(zlib.compress(text.encode())) / len(text) for text in texts]
    assert 2 * max(shares[::2]) < min(shares[1::2])


def test_one_flavour(build: Build) -> None:
    assert {sample.category for sample in load_task(build(categories=("low_entropy",)), LETTERS).samples} == {
        "low_entropy"
    }
    with pytest.raises(UserError, match=r"eval\.categories: unknown flavour 'high': did you mean 'high_entropy'"):
        load_task(build(categories=("high",)), LETTERS)


@pytest.mark.parametrize("content", ["a", "Say this:\n\n  1, 2", "x <|end_message|> y", "ends in space "])
def test_a_frame_is_what_the_template_puts_around_a_text(packaged: EvalModel, content: str) -> None:
    tokenizer = packaged.load_tokenizer()
    frame = PromptFrame.of(tokenizer, "chat")
    rendered = tokenizer.encode_chat([{"role": "user", "content": content}]).token_ids
    assert rendered == [*frame.before, *frame.text_ids(content), *frame.behind]
    # What spells a special token is plain text in a chat.
    is_plain = frame.text_ids(content) == tokenizer.encode(content, add_special_tokens=False)
    assert is_plain == ("<|" not in content)


def test_texts_of_a_file(build: Build, write_jsonl: Callable[..., str]) -> None:
    rows = [
        {"category": "rag", "turns": ["one", "two"]},
        {"category": "qa", "prompt": "three"},
        {"category": "rag", "messages": [{"role": "user", "content": "four"}]},
    ]
    path = write_jsonl(rows)
    task = load_task(build(data=path, categories=("rag",), num_samples=3), LETTERS)
    texts = [LetterTokenizer().decode(ids) for ids in prompts(task)]
    assert [text[:15] for text in texts] == ["Text 1.\n\n\n\none\n", "Text 2.\n\n\n\nfour", "Text 3.\n\n\n\none\n"]
    assert all(text.endswith("Sum up the above, then go on with it.") for text in texts)
    assert (task.data.path, {sample.category for sample in task.samples}) == (path, {"rag"})
    with pytest.raises(UserError, match=r"eval\.categories: unknown category 'rga': did you mean 'rag'"):
        load_task(build(data=path, categories=("rga",)), LETTERS)
    with pytest.raises(UserError, match='no "text"'):
        load_task(build(data=write_jsonl([{"body": "x"}])), LETTERS)


def test_lengths_that_cannot_be(build: Build) -> None:
    with pytest.raises(UserError, match=r"eval\.isl: 20 tokens are too few: template and instruction take \d+"):
        load_task(build(isl=20), LETTERS)
    with pytest.raises(UserError, match=r"eval\.isl: 4090 tokens and 50 of output"):
        load_task(build(isl=4090), LETTERS)
    with pytest.raises(UserError, match=r"eval\.isl: prompts of a fixed length need"):
        load_task(build(isl=None), LETTERS)
    with pytest.raises(UserError, match=r"model\.tokenizer: the checkpoint has none"):
        load_task(build(), EvalModel(is_packaged=False, max_model_len=4096))
