"""lm-eval's view of a model: its `LM`, over what requests of the Generate protocol answered.

Belongs here: from lm-eval's instances to samples, and from records back to the responses that lm-eval expects. Does
not belong here: loading tasks (lm_eval_tasks.py), judging (lm_eval_judge.py), running requests (the target).

lm-eval asks twice for the same instances. First they become samples, which run like those of any other eval:
measured, in the journal, with their acceptance. Then this LM answers from the records, and prompts, filters, metrics
and aggregation are lm-eval's own from end to end. Nothing runs inside it.

Likelihoods. The prompt is context and continuation; the prompt's log-probabilities from the continuation on are
summed. A context's trailing spaces count to the continuation, and both are tokenized together, as lm-eval's own
models do. Rolling ones cover every token once, in windows as long as the context.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from specbench.errors import UserError
from specbench.evals.task import EvalModel, Sample
from specbench.generate import Message
from specbench.records import SampleRecord

#: Begins a context that is a chat, as JSON: the target renders it, as it does for every eval.
CHAT_MARK = "\x00chat\x00"

#: (task, document, request of the document, copy of the request): one piece of work for the model.
Key = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Asked:
    """One instance, and the samples that answer it: several for the windows of a long text."""

    key: Key
    samples: tuple[Sample, ...]

    @property
    def is_first_of_document(self) -> bool:
        """Its record stands for the document in counts of answers."""
        return self.key[2:] == (0, 0)


class SampleMaker:
    """Turns instances into samples."""

    def __init__(
        self, model: EvalModel, max_output_tokens: int, stop: tuple[str, ...] | None, *, has_categories: bool
    ) -> None:
        self._model = model
        self._has_categories = has_categories
        self._max_output_tokens = max_output_tokens
        self._stop = stop

    def asked(self, instance: Instance, copy: int, *, is_only: bool, reference: str) -> Asked:
        """`is_only`: whether the document has no other request; `reference` goes with the document's first."""
        assert instance.task_name is not None and instance.doc_id is not None
        key = (instance.task_name, instance.doc_id, instance.idx, copy)
        name = f"{instance.task_name}-{instance.doc_id:05d}"
        name += "" if is_only else f"-{instance.idx}"
        name += f"-copy{copy}" if copy else ""
        samples = self._samples(instance, name)
        if key[2:] == (0, 0):
            samples = [replace(samples[0], reference=reference), *samples[1:]]
        if self._has_categories:
            samples = [replace(sample, category=instance.task_name) for sample in samples]
        return Asked(key, tuple(samples))

    def _samples(self, instance: Instance, name: str) -> list[Sample]:
        if instance.request_type == "generate_until":
            return [self._generating(name, instance)]
        if instance.request_type == "loglikelihood_rolling":
            windows = self._windows(instance.args[0])
            return [
                self._likelihood(f"{name}-window{index}" if index else name, context, continuation)
                for index, (context, continuation) in enumerate(windows)
            ]
        return [self._likelihood(name, *self._pair(*instance.args[:2]))]

    def _generating(self, name: str, instance: Instance) -> Sample:
        context, kwargs = instance.args[0], dict(instance.args[1])
        until = kwargs.get("until") or ()
        stop = tuple([until] if isinstance(until, str) else until)
        caps = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        cap = next((kwargs[key] for key in caps if kwargs.get(key) is not None), self._max_output_tokens)
        chat = _chat(context)
        return Sample(
            name,
            int(cap),
            prompt=None if chat is not None else context,
            messages=chat,
            stop=self._stop if self._stop is not None else tuple(text for text in stop if text),
        )

    def _likelihood(self, name: str, context: Sequence[int], continuation: Sequence[int]) -> Sample:
        return Sample(
            name,
            1,
            prompt_token_ids=(*context, *continuation),
            scored_from=len(context),
        )

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        tokenizer = self._model.load_tokenizer()
        chat = _chat(context)
        if chat is not None:
            return tokenizer.encode_chat(chat).token_ids, tokenizer.encode(continuation, add_special_tokens=False)
        bare = context.rstrip()
        if not bare:
            return [self._prefix_token()], tokenizer.encode(context + continuation, add_special_tokens=False)
        continuation = context[len(bare) :] + continuation
        before, whole = tokenizer.encode(bare), tokenizer.encode(bare + continuation)
        return before, whole[len(before) :]

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """(context, continuation) of each window."""
        ids = self._model.load_tokenizer().encode(text, add_special_tokens=False)
        # One token of room for the output that a request has at least.
        windows = get_rolling_token_windows(ids, self._prefix_token(), self._model.max_model_len - 2, 1)
        return [make_disjoint_window(window) for window in windows]

    def _prefix_token(self) -> int:
        """What stands before the first token: the one that begins a text, else one that ends it."""
        bos = self._model.load_tokenizer().bos_token_id
        ids = [*([] if bos is None else [bos]), *self._model.eos_token_ids]
        if not ids:
            raise UserError("eval.tasks: likelihoods of whole texts need a model with a bos or eos token")
        return ids[0]


class RecordedLM(LM):
    """Answers lm-eval from records. A failed request is an empty text, or an impossible continuation."""

    def __init__(self, asked: Iterable[Asked], records: Mapping[str, SampleRecord]) -> None:
        super().__init__()
        self._samples = {one.key: one.samples for one in asked}
        self._records = records

    @property
    def tokenizer_name(self) -> str:
        """Part of the key of a cache that is not used."""
        return "specbench"

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """The chat as it is: see CHAT_MARK."""
        return chat_context(chat_history, add_generation_prompt)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The text of each."""
        return [self._text(key) for key in keys(requests)]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether greedy decoding says it) of each."""
        return [self._likelihood(key) for key in keys(requests)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Log-probability of each text, all its windows together."""
        return [self._likelihood(key)[0] for key in keys(requests)]

    def _text(self, key: Key) -> str:
        (sample,) = self._samples[key]
        record = self._records.get(sample.sample_id)
        return "" if record is None else record.output_text

    def _likelihood(self, key: Key) -> tuple[float, bool]:
        records = [self._records.get(sample.sample_id) for sample in self._samples[key]]
        values = [None if record is None else record.loglikelihood for record in records]
        if any(value is None for value in values):
            return float("-inf"), False
        is_greedy = all(record is not None and record.is_greedy is True for record in records)
        return sum(value for value in values if value is not None), is_greedy


def chat_context(chat_history: Sequence[Message], add_generation_prompt: bool = True) -> str:
    """A chat as a context. UserError where a task begins the assistant's answer."""
    if not add_generation_prompt:
        raise UserError(
            "eval.protocol: this task begins the assistant's answer itself (gen_prefix), which a chat here cannot; say "
            "eval.protocol=completion"
        )
    return CHAT_MARK + json.dumps([dict(message) for message in chat_history])


def keys(instances: Sequence[Instance]) -> list[Key]:
    """Their keys, the n-th of equal ones as copy n: lm-eval repeats an instance as often as its task says."""
    seen: dict[tuple[str, int, int], int] = {}
    found: list[Key] = []
    for instance in instances:
        assert instance.task_name is not None and instance.doc_id is not None
        key = (instance.task_name, instance.doc_id, instance.idx)
        found.append((*key, seen.get(key, 0)))
        seen[key] = seen.get(key, 0) + 1
    return found


def _chat(context: str) -> tuple[Message, ...] | None:
    return tuple(json.loads(context[len(CHAT_MARK) :])) if context.startswith(CHAT_MARK) else None
