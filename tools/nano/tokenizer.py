"""The byte-level BPE tokenizer of inkling-nano, with Inkling's own special strings and chat format.

Digits are tokens of their own, so that arithmetic is learnt digit by digit. Special tokens take the first ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
MODEL_MAX_LENGTH = 2048

END_OF_TEXT = "<|endoftext|>"
USER = "<|message_user|>"
MODEL = "<|message_model|>"
SYSTEM = "<|message_system|>"
CONTENT_TEXT = "<|content_text|>"
END_MESSAGE = "<|end_message|>"
END_SAMPLING = "<|content_model_end_sampling|>"
IMAGE_MARK = "<|content_image|>"
AUDIO_MARK = "<|content_audio_input|>"
AUDIO_END = "<|audio_end|>"
IMAGE_PLACEHOLDER = "<|unused_200054|>"
AUDIO_PLACEHOLDER = "<|unused_200053|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    USER,
    MODEL,
    SYSTEM,
    "<|message_tool|>",
    CONTENT_TEXT,
    "<|content_thinking|>",
    "<|content_xml|>",
    "<|content_invoke_tool_json|>",
    IMAGE_MARK,
    AUDIO_MARK,
    AUDIO_END,
    END_MESSAGE,
    END_SAMPLING,
    AUDIO_PLACEHOLDER,
    IMAGE_PLACEHOLDER,
)

# One digit; a word with its space; other signs with their space; white space. A number's space stays apart.
_SPLIT = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set role = "model" if message.role == "assistant" else message.role -%}
{%- set parts = [{"type": "text", "text": message.content}] if message.content is string else message.content -%}
{%- for part in parts -%}
{%- if part.type == "text" -%}
{{- "<|message_" ~ role ~ "|><|content_text|>" ~ part.text ~ "<|end_message|>" -}}
{%- elif part.type == "audio" -%}
{{- "<|message_" ~ role ~ "|><|content_audio_input|><|audio_end|><|end_message|>" -}}
{%- else -%}
{{- raise_exception("a part is text or audio, not " ~ part.type) -}}
{%- endif -%}
{%- endfor -%}
{%- if role == "model" -%}
{{- "<|content_model_end_sampling|>" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|message_model|>" -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learns the merges from `texts`; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MODEL_MAX_LENGTH,
        "eos_token": END_SAMPLING,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": [token for token in SPECIAL_TOKENS if token not in (END_SAMPLING, END_OF_TEXT)],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
