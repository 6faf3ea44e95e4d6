"""From messages to the text of a prompt.

Belongs here: Jinja chat templates, found and rendered, and the built-in renderer of Inkling's chat format. Does not
belong here: token ids (tokenizer.py).

A template is data from a checkpoint and is trusted with nothing: it runs in Jinja's immutable sandbox, sees strings
only, and can neither import nor call what it was not given. It renders as `transformers` renders it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specbench.errors import UserError
from specbench.generate import Message

#: Effort "high", the format's default.
INKLING_EFFORT = "Thinking effort level: 0.9"

#: A clip; the engine puts its placeholders behind the marker.
INKLING_AUDIO = "<|message_user|><|content_audio_input|><|audio_end|><|end_message|>"

#: Tokens without which Inkling's chat format cannot be written.
INKLING_TOKENS = (
    "<|message_system|>",
    "<|message_user|>",
    "<|message_model|>",
    "<|content_text|>",
    "<|end_message|>",
    "<|content_model_end_sampling|>",
)


class ChatFormat(Protocol):
    """How messages become a prompt."""

    #: Text in which every control token of the format can be found; "" where all of them are special tokens.
    source: str

    def render(self, messages: Sequence[Message], num_clips: int = 0) -> str:
        """The prompt, up to where the assistant's answer begins, with markers for clips that are heard before the text
        of the first user message."""
        ...


class InklingChat:
    """Inkling's format without a template: system messages, the effort block, then the turns."""

    source = ""

    def render(self, messages: Sequence[Message], num_clips: int = 0) -> str:
        first_turn = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        effort: Message = {"role": "system", "content": INKLING_EFFORT}
        blocks = [self._block(message) for message in (*messages[:first_turn], effort, *messages[first_turn:])]
        if num_clips:
            place = _first_user_message(messages)
            blocks.insert(place + (place >= first_turn), num_clips * INKLING_AUDIO)
        return "".join(blocks) + "<|message_model|>"

    def _block(self, message: Message) -> str:
        role, body = message["role"], f"<|content_text|>{message['content']}<|end_message|>"
        if role == "assistant":
            return f"<|message_model|>{body}<|content_model_end_sampling|>"
        if role in ("system", "user"):
            return f"<|message_{role}|>{body}"
        raise UserError(f"the built-in Inkling chat format has no role {role!r}: use system, user or assistant")


class JinjaChat:
    """A checkpoint's own template."""

    def __init__(self, source: str, special_tokens: dict[str, str], origin: Path) -> None:
        self.source = source
        self._special_tokens = special_tokens
        self._origin = origin
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"{origin}: the chat template is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Message], num_clips: int = 0) -> str:
        parts: list[dict[str, Any]] = [dict(message) for message in messages]
        if num_clips:
            first = parts[_first_user_message(messages)]
            first["content"] = [{"type": "audio"}] * num_clips + [{"type": "text", "text": first["content"]}]
        try:
            return self._template.render(
                messages=parts,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program of somebody else's
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"{self._origin}: the chat template refuses messages of roles {roles}: {error}") from error


def _first_user_message(messages: Sequence[Message]) -> int:
    for place, message in enumerate(messages):
        if message["role"] == "user":
            return place
    raise UserError("audio is heard before the text of the first user message, and the chat has none: add one")


def find_chat_format(folders: Sequence[Path], override: str | None, known_tokens: set[str]) -> ChatFormat | None:
    """The format to render with: the override, a folder's own template, Inkling's format by its tokens, or none."""
    special_tokens = _special_tokens(folders)
    if override is not None:
        return JinjaChat(_read_text(Path(override), "model.chat_template"), special_tokens, Path(override))
    for folder in folders:
        if (origin := folder / "chat_template.jinja").is_file():
            return JinjaChat(_read_text(origin, "the chat template"), special_tokens, origin)
        origin = folder / "tokenizer_config.json"
        source = _default_template(_read_config(origin))
        if source is not None:
            return JinjaChat(source, special_tokens, origin)
    return InklingChat() if known_tokens.issuperset(INKLING_TOKENS) else None


def _default_template(config: dict[str, Any]) -> str | None:
    """The template in a tokenizer_config.json: a text, or of a list of named ones the one called default."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _special_tokens(folders: Sequence[Path]) -> dict[str, str]:
    """bos_token, eos_token and so on, which templates may name."""
    tokens: dict[str, str] = {}
    for folder in reversed(folders):
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            for key, value in _read_config(folder / file).items():
                text = value.get("content") if isinstance(value, dict) else value
                if key.endswith("_token") and isinstance(text, str):
                    tokens[key] = text
    return tokens


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a JSON object")
    return config


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{what}: can't read {path}: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's text for training: here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    """Today: a template that prints it makes prompts of different days differ, under every engine."""
    return datetime.now().strftime(date_format)
