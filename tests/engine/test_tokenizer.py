"""Finding a tokenizer, encoding the three kinds of prompt, and reading the answer off an output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from specbench.engine.tokenizer import Tokenizer, encode_prompt, load_tokenizer
from specbench.errors import UserError
from specbench.generate import GenerateRequest, SamplingParams

INKLING_SPECIAL = [
    "<|message_user|>",
    "<|message_model|>",
    "<|message_system|>",
    "<|content_text|>",
    "<|content_thinking|>",
    "<|content_invoke_tool_json|>",
    "<|end_message|>",
    "<|content_model_end_sampling|>",
]


def byte_level(special: list[str]) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return backend


def saved(folder: Path, special: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    byte_level(special).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def inkling() -> Tokenizer:
    return Tokenizer(byte_level(INKLING_SPECIAL), None, Path("."))


def request(**prompt: object) -> GenerateRequest:
    return GenerateRequest("r0", "s0", SamplingParams(max_output_tokens=1), **prompt)  # type: ignore[arg-type]


def test_a_checkpoint_without_a_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is None
    assert encode_prompt(None, request(prompt_token_ids=(5, 6))).token_ids == [5, 6]
    assert encode_prompt(None, request(prompt_token_ids=(5, 6))).text is None
    for prompt in ({"prompt": "a"}, {"messages": ({"role": "user", "content": "a"},)}):
        with pytest.raises(UserError, match=r"request r0: .* give model\.tokenizer=PATH"):
            encode_prompt(None, request(**prompt))


def test_the_override_comes_before_the_checkpoints_own(tmp_path: Path) -> None:
    checkpoint, other = saved(tmp_path / "checkpoint", ["<a>"]), saved(tmp_path / "other", ["<b>"])
    for override, token in [(None, "<a>"), (other, "<b>"), (other / "tokenizer.json", "<b>")]:
        tokenizer = load_tokenizer(checkpoint, None if override is None else str(override))
        assert tokenizer is not None
        assert tokenizer.token_id(token) is not None
    with pytest.raises(UserError, match=r"model\.tokenizer: .* does not exist"):
        load_tokenizer(checkpoint, str(tmp_path / "missing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"model\.tokenizer: .* holds no tokenizer files"):
        load_tokenizer(checkpoint, str(tmp_path / "empty"))


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)
    saved(tmp_path, [])
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: not valid JSON"):
        load_tokenizer(tmp_path)


def test_older_files_are_converted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("ab") == [vocab["ab"]]
    assert tokenizer.decode([vocab["ab"]]) == "ab"


def test_text_prompts(tmp_path: Path) -> None:
    """Special tokens in a text prompt are tokens; the tokenizer's own go in front; nothing is padded or cut."""
    backend = byte_level(["<s>", "<x>"])
    begin = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer(backend, None, tmp_path)
    prompt = encode_prompt(tokenizer, request(prompt="abcdef<x>"))
    assert prompt.token_ids[0] == begin
    assert prompt.token_ids[-1] == tokenizer.token_id("<x>")
    assert len(prompt.token_ids) == 8
    assert prompt.text == "abcdef<x>"
    assert tokenizer.encode("a", add_special_tokens=False) == prompt.token_ids[1:2]
    assert tokenizer.decode(prompt.token_ids) == "abcdef"


@pytest.mark.parametrize(
    ("output", "answer", "reasoning"),
    [
        ("<|content_text|>It is 5.<|end_message|><|content_model_end_sampling|>", "It is 5.", ""),
        (
            "<|content_thinking|>2+3<|end_message|><|message_model|><|content_text|>It is 5.<|end_message|>",
            "It is 5.",
            "2+3",
        ),
        ("<|content_thinking|>hm<|end_message|><|message_model|><|content_text|>5", "5", "hm"),
        ("<|content_thinking|>It is 7, or", "", "It is 7, or"),
        ("<|content_thinking|>It is 7<|end_message|>", "", "It is 7"),
        ("<|content_thinking|>7<|end_message|><|message_model|>", "", "7"),
        (
            "<|content_thinking|>a<|end_message|><|message_model|><|content_thinking|>b<|end_message|>"
            "<|message_model|><|content_text|>c<|end_message|><|message_model|><|content_text|>d",
            "cd",
            "ab",
        ),
        (
            "<|content_text|>Let me look.<|end_message|><|message_model|>search<|content_invoke_tool_json|>"
            '{"name": "search"}<|end_message|>',
            "Let me look.",
            "",
        ),
        (
            "<|content_text|>5<|end_message|><|content_model_end_sampling|><|message_user|><|content_text|>And 6?"
            "<|end_message|><|message_model|><|content_text|>6",
            "5",
            "",
        ),
        ("It is 5.", "It is 5.", ""),
        (" 5\nQuestion: <|content_model_end_sampling|>", " 5\nQuestion: ", ""),
        ("", "", ""),
    ],
)
def test_channels(output: str, answer: str, reasoning: str, inkling: Tokenizer) -> None:
    channels = inkling.split_channels(inkling.encode(output))
    assert (channels.answer_text, channels.reasoning_text) == (answer, reasoning)
    assert inkling.decode(channels.answer_token_ids) == answer


def test_a_stop_string_is_cut_off_the_end_of_whichever_channel(inkling: Tokenizer) -> None:
    ids = inkling.encode("<|content_thinking|>hm<|end_message|><|message_model|><|content_text|>5\nEND")
    assert inkling.split_channels(ids, num_cut_chars=3).answer_text == "5\n"
    ids = inkling.encode("<|content_thinking|>hm END")
    assert inkling.split_channels(ids, num_cut_chars=4).reasoning_text == "hm"
    ids = inkling.encode("<|content_thinking|>hm E<|end_message|><|message_model|><|content_text|>ND")
    channels = inkling.split_channels(ids, num_cut_chars=3)
    assert (channels.answer_text, channels.reasoning_text) == ("", "hm ")


@pytest.mark.parametrize(
    ("prompt", "output", "answer", "reasoning"),
    [
        ("Q", "<think>hm</think>5", "5", "hm"),
        ("Q", "5", "5", ""),
        ("Q", "<think>hm", "", "hm"),
        ("Q<think>", "hm</think>5", "5", "hm"),
        ("<think>old</think>4. Q", "5", "5", ""),
    ],
)
def test_what_think_tokens_enclose_is_reasoning(prompt: str, output: str, answer: str, reasoning: str) -> None:
    tokenizer = Tokenizer(byte_level(["<think>", "</think>"]), None, Path("."))
    channels = tokenizer.split_channels(tokenizer.encode(output), prompt_token_ids=tokenizer.encode(prompt))
    assert (channels.answer_text, channels.reasoning_text) == (answer, reasoning)


def test_a_tokenizer_without_channel_tokens_has_one_channel() -> None:
    tokenizer = Tokenizer(byte_level(["<think>"]), None, Path("."))
    channels = tokenizer.split_channels(tokenizer.encode("<|content_thinking|>5"))
    assert (channels.answer_text, channels.reasoning_text) == ("<|content_thinking|>5", "")


def test_importing_the_tokenizer_imports_neither_torch_nor_transformers() -> None:
    heavy = "{'torch', 'transformers', 'datasets'}"
    code = f"import sys, specbench.engine.tokenizer; print(sorted({heavy} & set(sys.modules)))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, None), ({"bos_token": None}, None), ({"bos_token": "a"}, "a"), ({"bos_token": {"content": "a"}}, "a")],
)
def test_the_token_that_begins_a_text(tmp_path: Path, config: dict, expected: str | None) -> None:
    tokenizer = Tokenizer(byte_level(INKLING_SPECIAL), None, tmp_path)
    assert tokenizer.bos_token_id is None  # no file
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer.bos_token_id == (None if expected is None else tokenizer.token_id(expected))
