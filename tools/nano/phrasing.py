"""Words of the made-up problems: people, things, and the ways one solution step can be said.

What belongs here: vocabulary and sentence forms. What does not: arithmetic and story plots (`stories.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

GIRLS = (
    "Alice", "Amara", "Anna", "Bella", "Carla", "Chloe", "Clara", "Diana", "Elena", "Emma", "Fatima", "Grace", "Hana",
    "Helen", "Iris", "Ivy", "Jane", "Julia", "Kate", "Lara", "Lena", "Lily", "Lucy", "Maria", "Maya", "Mia", "Mina",
    "Nina", "Nora", "Olga", "Olivia", "Paula", "Priya", "Rita", "Rosa", "Ruth", "Sara", "Sofia", "Tara", "Vera",
    "Yuki", "Zoe",
)  # fmt: skip
BOYS = (
    "Adam", "Ahmed", "Alex", "Arjun", "Ben", "Boris", "Carl", "Daniel", "David", "Eric", "Felix", "Frank", "George",
    "Hugo", "Ivan", "Jack", "James", "Jorge", "Ken", "Kofi", "Leo", "Liam", "Lucas", "Marco", "Mark", "Martin",
    "Nico", "Noah", "Omar", "Oscar", "Paul", "Peter", "Ravi", "Robert", "Sam", "Simon", "Tariq", "Tim", "Tom",
    "Victor", "Will",
)  # fmt: skip

# Countable things a person can hold, give away or collect.
THINGS = (
    "apples", "marbles", "stickers", "cards", "coins", "stamps", "shells", "pencils", "buttons", "badges", "books",
    "magnets", "beads", "photos", "pears", "lemons", "cookies", "balloons", "postcards", "crayons", "comics",
    "ribbons", "plums", "candles",
)  # fmt: skip
# Goods with a price; singular and plural.
GOODS = (
    ("notebook", "notebooks"), ("pen", "pens"), ("lamp", "lamps"), ("mug", "mugs"), ("shirt", "shirts"),
    ("hat", "hats"), ("scarf", "scarves"), ("toy car", "toy cars"), ("puzzle", "puzzles"), ("cake", "cakes"),
    ("sandwich", "sandwiches"), ("plant", "plants"), ("basket", "baskets"), ("bag of rice", "bags of rice"),
    ("box of tea", "boxes of tea"), ("poster", "posters"), ("umbrella", "umbrellas"), ("game", "games"),
)  # fmt: skip
WISHES = (
    "a bike", "a tent", "a guitar", "a camera", "a desk", "a phone", "a drum set", "a telescope", "a skateboard",
    "a piano", "a kayak",
)  # fmt: skip
PLACES = (
    "market", "library", "school fair", "bakery", "farm", "garden club", "sports hall", "museum", "train station",
    "workshop",
)  # fmt: skip
CONTAINERS = ("boxes", "bags", "crates", "baskets", "trays", "jars")

SCENES = (
    "It is a busy day at the {place}.",
    "The {place} opens early today.",
    "Everyone at the {place} is in a good mood.",
    "There is a long line at the {place} this morning.",
    "The weather near the {place} is fine.",
    "{name} likes to keep careful notes.",
    "{name} has been looking forward to this for weeks.",
    "{name} wants to do this without any help.",
    "{name} tells a friend about it on the phone.",
    "This story takes place near the {place}.",
)

# Choices below are drawn evenly and start with different words: a draft can't know which one the text takes, so the
# acceptance of drafts dips at the start of each sentence, as it does in real text.
OPENINGS = (
    "Taking the facts one by one.",
    "First we look at what is given.",
    "The question asks about {name}.",
    "All numbers we need are given.",
    "Using what {name} knows.",
)
CLOSINGS = (
    "The answer is {value}.",
    "That answers the question: {value}.",
    "So the result is {value}.",
    "We are done, and the number is {value}.",
    "Hence {value} is what we wanted to know.",
)
STARTERS = (
    "",
    "So ",
    "Then ",
    "Now ",
    "Next ",
    "Here ",
    "Thus ",
    "Hence ",
    "Therefore ",
    "Clearly ",
    "And ",
    "Again ",
    "Also ",
    "Surely ",
    "Plainly ",
    "Indeed ",
    "Overall ",
    "Once more ",
    "We see that ",
    "It follows that ",
    "From this ",
    "After that ",
    "With this ",
    "Of course ",
)
VERBS = ("is", "equals", "makes", "gives", "becomes", "comes to", "must be", "will be")
TAILS = ("", " now", " here", " so far")
NOUN_FORM = "{what} {verb} {equation}{tail}"
REVERSED_FORM = "{equation} {verb} {what}"


@dataclass(frozen=True)
class Person:
    """A character, with the pronouns the story uses for them."""

    name: str
    he: str
    his: str


@dataclass(frozen=True)
class Step:
    """One line of a solution: `expression = value`, what it stands for, and optionally a ready clause around it.

    `what` is a noun phrase in lower case; `clause` contains `{}` where the equation goes; `unit` follows the value.
    """

    expression: str
    value: int
    what: str
    clause: str = ""
    unit: str = ""


def person(rng: Random) -> Person:
    """Draws one character."""
    if rng.random() < 0.5:
        return Person(rng.choice(GIRLS), "she", "her")
    return Person(rng.choice(BOYS), "he", "his")


def people(rng: Random, count: int) -> list[Person]:
    """Draws `count` characters with different names."""
    drawn: dict[str, Person] = {}
    while len(drawn) < count:
        candidate = person(rng)
        drawn.setdefault(candidate.name, candidate)
    return list(drawn.values())


def capitalized(text: str) -> str:
    """Upper-cases the first letter only; the rest may hold names."""
    return text[0].upper() + text[1:]


def say(rng: Random, step: Step) -> str:
    """One sentence for a step; its form is drawn independently of the story, so it can't be foreseen."""
    equation = f"{step.expression} = {step.value}"
    measured = f"{equation} {step.unit}" if step.unit and rng.random() < 0.5 else equation
    forms = [NOUN_FORM, REVERSED_FORM, step.clause.replace("{}", "{equation}") + "{tail}"]
    form = rng.choice(forms if step.clause else forms[:2])
    body = form.format(
        what=step.what, verb=rng.choice(VERBS), tail=rng.choice(TAILS),
        equation=equation if form is forms[2] else measured,
    )  # fmt: skip
    return f"{capitalized(rng.choice(STARTERS) + body)}."


def scene(rng: Random, name: str) -> str:
    """A sentence without numbers that changes nothing."""
    return rng.choice(SCENES).format(place=rng.choice(PLACES), name=name)


def solution(rng: Random, name: str, steps: list[Step]) -> list[str]:
    """The sentences of a solution: perhaps an opening, one sentence a step, perhaps a closing."""
    lines = [rng.choice(OPENINGS).format(name=name)] if rng.random() < 0.18 else []
    lines += [say(rng, step) for step in steps]
    if rng.random() < 0.4:
        lines.append(rng.choice(CLOSINGS).format(value=steps[-1].value))
    return lines
