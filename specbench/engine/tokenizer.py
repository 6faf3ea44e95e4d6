"""From requests to token ids and back.

Belongs here: finding a checkpoint's tokenizer, encoding prompts and chats, decoding outputs. Does not belong here: chat
templates (chat.py), streams of text (detokenizer.py), stop strings (stop_strings.py), channels (channels.py).

Special tokens. In `prompt` text they are special tokens, as in every engine: such a prompt is the caller's from end
to end. In a chat the template alone may write them: where a message's own text spells one, it is encoded as plain text.
Added tokens that a template writes though they are not marked special (role headers, in some vocabularies) are guarded
in the same way, except in assistant messages, where a template may want to find them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from specbench.engine.channels import CHANNEL_MARKERS, THINK_MARKERS, Channels, split_channels
from specbench.engine.chat import ChatFormat, find_chat_format
from specbench.engine.checkpoints.checkpoint import read_json
from specbench.engine.detokenizer import ByteLevelDetokenizer, IncrementalDetokenizer, TokenBytes, WindowDetokenizer
from specbench.errors import UserError
from specbench.generate import GenerateRequest, Message

_CONFIG_FILE = "tokenizer_config.json"
#: Files that `transformers` can build a tokenizer from, where there is no tokenizer.json.
_CONVERTIBLE_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken/tokenizer.model")

#: Never assigned to a character: one of these breaks a control token's spelling while a template is rendered.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the model sees it, and its text where there is one."""

    token_ids: list[int]
    text: str | None


class Tokenizer:
    """A checkpoint's tokenizer and chat format."""

    def __init__(self, backend: tokenizers.Tokenizer, chat: ChatFormat | None, origin: Path) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self._chat = chat
        self._origin = origin
        self._description = json.loads(backend.to_str())
        self._added: dict[str, int] = {token["content"]: token["id"] for token in self._description["added_tokens"]}
        self.special_ids = frozenset(t["id"] for t in self._description["added_tokens"] if t["special"])
        self._token_bytes = TokenBytes(backend, self.special_ids) if self._is_byte_level else None
        markers = CHANNEL_MARKERS | THINK_MARKERS if self._added.keys() >= THINK_MARKERS.keys() else CHANNEL_MARKERS
        self._channel_of = {self._added[name]: kind for name, kind in markers.items() if name in self._added}

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, by tokenizer_config.json; None where it names none."""
        file = self._origin / _CONFIG_FILE
        named = (read_json(file) if file.exists() else {}).get("bos_token")
        name = named.get("content") if isinstance(named, dict) else named
        return self.token_id(name) if isinstance(name, str) else None

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens` lets the tokenizer put its own (bos) in front, where it has such."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, special tokens left out."""
        return self.backend.decode(list(token_ids))

    def encode_chat(self, messages: Sequence[Message], num_clips: int = 0) -> EncodedPrompt:
        """The chat as a prompt for the assistant's next turn; `num_clips` are heard before the first user's text."""
        if self._chat is None:
            raise UserError(
                f"{self._origin}: no chat template: give model.chat_template=FILE.jinja or eval.protocol=completion"
            )
        breaker = _unused_character(messages)
        guarded = [self._guard(message, breaker) for message in messages]
        rendered = self._chat.render(guarded, num_clips)
        text = rendered.replace(breaker, "")
        if text == rendered:
            return EncodedPrompt(self.encode(text, add_special_tokens=False), text)
        return EncodedPrompt(self._encode_guarded(rendered, breaker), text)

    def new_detokenizer(self) -> IncrementalDetokenizer:
        """A fresh stream for one request."""
        if self._token_bytes is not None:
            return ByteLevelDetokenizer(self._token_bytes)
        return WindowDetokenizer(self.backend, self.special_ids)

    def split_channels(
        self, output_token_ids: Sequence[int], num_cut_chars: int = 0, prompt_token_ids: Sequence[int] = ()
    ) -> Channels:
        """The answer and the reasoning of an output, its last `num_cut_chars` characters cut off (a stop string)."""
        return split_channels(output_token_ids, self._channel_of, self.decode, num_cut_chars, prompt_token_ids)

    @property
    def _is_byte_level(self) -> bool:
        decoder = self._description["decoder"]
        return decoder is not None and decoder["type"] == "ByteLevel"

    def _guard(self, message: Message, breaker: str) -> Message:
        """The message with every control token in its text broken by `breaker`."""
        control = self._special_names()
        if message["role"] != "assistant":
            control |= self._template_names()
        pattern = _any_of(control)
        return {key: pattern.sub(lambda hit: hit[0][0] + breaker + hit[0][1:], text) for key, text in message.items()}

    def _special_names(self) -> set[str]:
        return {name for name, token_id in self._added.items() if token_id in self.special_ids}

    def _template_names(self) -> set[str]:
        assert self._chat is not None
        return {name for name in self._added if name in self._chat.source}

    def _encode_guarded(self, rendered: str, breaker: str) -> list[int]:
        """Encode a rendered chat whose broken control tokens are plain text and whose whole ones are tokens."""
        plain = self._without_added_tokens()
        ids: list[int] = []
        for part in re.split(f"({_any_of(self._added).pattern})", rendered):
            if part in self._added:
                ids.append(self._added[part])
                continue
            part_ids = plain.encode(part.replace(breaker, ""), add_special_tokens=False).ids
            if not self.special_ids.isdisjoint(part_ids):
                raise UserError(f"{self._origin}: a message spells a special token that can't be encoded as plain text")
            ids += part_ids
        return ids

    def _without_added_tokens(self) -> tokenizers.Tokenizer:
        """The same vocabulary, in which an added token's spelling is plain text."""
        return tokenizers.Tokenizer.from_str(json.dumps({**self._description, "added_tokens": []}))


def load_tokenizer(
    checkpoint: str | Path, tokenizer: str | None = None, chat_template: str | None = None
) -> Tokenizer | None:
    """The tokenizer in `tokenizer` (a folder or a tokenizer.json), else the checkpoint's own, else None."""
    folders = [Path(checkpoint)]
    file = folders[0] / "tokenizer.json"
    if tokenizer is not None:
        path = Path(tokenizer)
        if not path.exists():
            raise UserError(f"model.tokenizer: {path} does not exist: give a folder or a tokenizer.json")
        file = path / "tokenizer.json" if path.is_dir() else path
        folders = [file.parent, *folders]
    if file.is_file():
        backend = _read_backend(file)
    elif any((folders[0] / name).is_file() for name in _CONVERTIBLE_FILES):
        backend = _convert(folders[0])
    elif tokenizer is not None:
        raise UserError(f"model.tokenizer: {folders[0]} holds no tokenizer files")
    else:
        return None
    chat = find_chat_format(folders, chat_template, set(backend.get_vocab(with_added_tokens=True)))
    return Tokenizer(backend, chat, folders[0])


def encode_prompt(tokenizer: Tokenizer | None, request: GenerateRequest) -> EncodedPrompt:
    """The prompt of a request, in whichever of the three forms it came."""
    if request.prompt_token_ids is not None:
        return EncodedPrompt(list(request.prompt_token_ids), None)
    if tokenizer is None:
        raise UserError(
            f"request {request.request_id}: a prompt of text needs a tokenizer and the checkpoint has none: "
            "give model.tokenizer=PATH, or rows with prompt_token_ids"
        )
    if request.messages is not None:
        return tokenizer.encode_chat(request.messages, len(request.audio))
    assert request.prompt is not None
    return EncodedPrompt(tokenizer.encode(request.prompt), request.prompt)


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        raise UserError(f"{file}: not a tokenizer that the tokenizers library can read: {error}") from error


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """A tokenizer.json made in memory from older files."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import, and seldom needed

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the conversion of a broken file raises
        raise UserError(f"{folder}: no tokenizer.json, and its other files can't be converted: {error}") from error
    if not isinstance(converted, PreTrainedTokenizerFast):
        raise UserError(f"{folder}: no tokenizer.json, and its tokenizer has no fast form: give model.tokenizer=PATH")
    return converted.backend_tokenizer


def _unused_character(messages: Sequence[Message]) -> str:
    text = "".join(value for message in messages for value in message.values())
    return next(character for character in _NONCHARACTERS if character not in text)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the names, the longest first."""
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)")
