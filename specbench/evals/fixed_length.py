"""Home-made prompts of exactly eval.isl tokens, each answered with exactly eval.osl.

Belongs here: the texts and what is asked of them. Does not belong here: the published set whose lengths these imitate
(speed_bench.py), counting tokens (exact_prompts.py).

Flavours (eval.categories):
    low_entropy    a list of entries in one form, to be gone on with: nearly every token follows from those before it
    high_entropy   sentences of words drawn anew, to be answered by a story: little follows from anything
With eval.data=FILE.jsonl the texts are those of its rows ("turns", "messages", "prompt", "question" or "text"), from
another row on for each prompt, and categories are the rows' own. Nothing is scored.

No two prompts begin alike, so that a prefix cache finds none of one in another.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence

from specbench.errors import UserError, near_name
from specbench.evals.exact_prompts import PromptFrame, check_room
from specbench.evals.rows import Row, read_rows
from specbench.evals.task import EvalModel, Sample, Task
from specbench.records import DataIdentity
from specbench.run_config import EvalConfig

LOW_ENTROPY, HIGH_ENTROPY = "low_entropy", "high_entropy"
#: Samples where eval.num_samples is unset.
NUM_SAMPLES = 128
MADE_HERE = "made up by specbench/evals/fixed_length.py"

# Words of the high-entropy texts; they mean nothing.
_NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Finn", "Gwen", "Hugo", "Iris", "Jonas", "Kira", "Leon", "Mona", "Nils")
_THINGS = (
    *("anchor", "basket", "candle", "drum", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle"),
    *("ladder", "mirror", "needle", "orchard", "piano", "quilt", "river", "saddle", "tower", "violin", "window"),
)
_KINDS = ("amber", "bitter", "calm", "dusty", "eager", "faint", "gentle", "hollow", "icy", "jolly", "loud", "narrow")
_DEEDS = ("carried", "counted", "forgot", "guarded", "hid", "invented", "lifted", "mended", "painted", "sold", "washed")
_PLACES = ("at dawn", "behind the mill", "in the north", "by mistake", "without a word", "after the storm")


def load_fixed_length(config: EvalConfig, model: EvalModel) -> Task:
    """The task: every prompt has eval.isl tokens, template included."""
    isl, osl = config.isl, config.osl
    if isl is None or osl is None:
        raise UserError("eval.isl: prompts of a fixed length need eval.isl and eval.osl, in tokens")
    check_room(isl, osl, model)
    frame = PromptFrame.of(model.load_tokenizer(), config.protocol)
    texts = _texts_of_file(config) if config.data is not None else _made_up_texts(config.categories)
    num_samples = config.num_samples or NUM_SAMPLES
    samples = tuple(
        Sample(
            sample_id=f"fixed-length-{index:04d}",
            max_output_tokens=osl,
            prompt_token_ids=_prompt(text, ending, isl, frame),
            category=category,
        )
        for index, (category, text, ending) in enumerate(itertools.islice(texts, num_samples))
    )
    data = DataIdentity(
        name=f"fixed_length_{isl}_{osl}",
        path=MADE_HERE if config.data is None else config.data,
        revision=None,
        sha256=hashlib.sha256(json.dumps([sample.prompt_token_ids for sample in samples]).encode()).hexdigest(),
        packaged=False,
        num_samples=len(samples),
    )
    return Task("fixed_length", data, samples, (), None, config.stop or (), ())


def _prompt(text: Callable[[int], str], ending: str, isl: int, frame: PromptFrame) -> tuple[int, ...]:
    """`text(n)` gives at least n characters of a text that goes on for ever."""
    num_characters = 4 * isl
    while len(ids := frame.text_ids(text(num_characters))) < isl:
        num_characters *= 2
    return frame.exactly(isl, ids, frame.text_ids(ending))


# ---- Texts, as (category, text, what is asked behind it)

Text = tuple[str, Callable[[int], str], str]


def _made_up_texts(flavours: Sequence[str] | None) -> Iterator[Text]:
    """Without end, the flavours in turn."""
    made = {LOW_ENTROPY: _entries, HIGH_ENTROPY: _sentences}
    for flavour in flavours or ():
        if flavour not in made:
            raise UserError(f"eval.categories: unknown flavour {flavour!r}: {near_name(flavour, made)}")
    endings = {
        LOW_ENTROPY: "\n\nGo on with this list in the same form.",
        HIGH_ENTROPY: "\n\nNow tell a story of your own in which some of this happens.",
    }
    for number in itertools.count():
        for flavour in flavours or tuple(made):
            yield flavour, _growing(made[flavour], f"{flavour}-{number}"), endings[flavour]


def _growing(parts: Callable[[random.Random], Iterator[str]], seed: str) -> Callable[[int], str]:
    """The text of `parts` up to any length, always the same one."""

    def text(num_characters: int) -> str:
        pieces, length = [], 0
        for part in parts(random.Random(seed)):
            pieces.append(part)
            length += len(part)
            if length >= num_characters:
                return "".join(pieces)
        raise AssertionError("parts go on for ever")

    return text


def _entries(chance: random.Random) -> Iterator[str]:
    """Lines that differ in a counter alone."""
    name, thing, first, step = (
        chance.choice(_NAMES),
        chance.choice(_THINGS),
        chance.randrange(100),
        chance.randrange(2, 9),
    )
    yield f"List {chance.randrange(10**6)} of {name}.\n"
    for number in itertools.count():
        yield f"Day {number + 1}: {name} has {first + step * number} of the {thing}s and gets {step} more.\n"


def _sentences(chance: random.Random) -> Iterator[str]:
    yield f"Page {chance.randrange(10**6)}. "
    while True:
        subject, deed, place = chance.choice(_NAMES), chance.choice(_DEEDS), chance.choice(_PLACES)
        kind, thing, other = chance.choice(_KINDS), chance.choice(_THINGS), chance.choice(_THINGS)
        number = chance.randrange(2, 99)
        forms = (
            f"{subject} {deed} the {kind} {thing} {place}. ",
            f"The {thing} of {subject} was {kind}, and no {other} came {place}. ",
            f'"{kind.capitalize()} as a {thing}," said {subject}, who {deed} {number} {other}s {place}. ',
        )
        yield chance.choice(forms)


def _texts_of_file(config: EvalConfig) -> Iterator[Text]:
    assert config.data is not None
    rows = read_rows(config.data, "eval.data").rows
    known = {str(row.value["category"]) for row in rows if "category" in row.value}
    for category in config.categories or ():
        if category not in known:
            raise UserError(f"eval.categories: unknown category {category!r}: {near_name(category, known)}")
    chosen = [row for row in rows if config.categories is None or str(row.value.get("category")) in config.categories]
    texts = [_row_text(row) for row in chosen]
    for number in itertools.count():
        index = number % len(chosen)
        category = str(chosen[index].value.get("category", "unnamed"))
        parts = [f"Text {number + 1}.\n\n", *texts[index:], *texts[:index]]
        yield category, _repeating(parts), "\n\nSum up the above, then go on with it."


def _repeating(parts: Sequence[str]) -> Callable[[int], str]:
    def text(num_characters: int) -> str:
        whole = "\n\n".join(parts)
        return whole * (1 + num_characters // len(whole))

    return text


def _row_text(row: Row) -> str:
    """What a user says in the row."""
    value = row.value
    if isinstance(value.get("turns"), list) and all(isinstance(turn, str) for turn in value["turns"]):
        return row.checked("\n\n".join(value["turns"]))
    if isinstance(value.get("messages"), list):
        return row.checked("\n\n".join(str(message.get("content", "")) for message in value["messages"]))
    key = next((key for key in ("prompt", "question", "text") if key in value), "text")
    return row.text(key)
