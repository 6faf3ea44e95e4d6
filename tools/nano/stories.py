"""Plots of the made-up problems: each draws its numbers and returns question sentences and solution steps.

A plot keeps every intermediate value a non-negative whole number and every division exact. Its last step is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.nano.phrasing import CONTAINERS, GOODS, THINGS, WISHES, Person, Step, people, person

TIMES_WORDS = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
PART_WORDS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}


@dataclass(frozen=True)
class Story:
    """A problem before it is worded: who it is about, what is told and asked, and how it is solved."""

    hero: str
    told: list[str]
    asked: str
    steps: list[Step]


def amount(rng: Random, low: int, high: int) -> int:
    """A number from `low` to `high`, even on a logarithmic scale: small and large ones are equally common."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _chain_gain(rng: Random, hero: Person, thing: str, have: int) -> tuple[str, Step]:
    gain = amount(rng, 12, 4000)
    giver = people(rng, 3)[0].name
    told = rng.choice([
        f"Then {hero.he} gets {gain} more {thing}.",
        f"A friend gives {hero.name} {gain} {thing}.",
        f"Later {hero.he} buys {gain} {thing}.",
        f"{hero.name} finds {gain} more {thing}.",
    ] + ([f"{giver} brings {hero.name} {gain} {thing}."] if giver != hero.name else []))  # fmt: skip
    clause = f"{hero.name} has {{}} {thing}"
    return told, Step(f"{have} + {gain}", have + gain, f"the new number of {thing}", clause, thing)


def _chain_loss(rng: Random, hero: Person, thing: str, have: int) -> tuple[str, Step]:
    loss = rng.randint(max(1, have // 8), max(2, 3 * have // 5))
    told = rng.choice([
        f"After that {hero.he} gives away {loss} {thing}.",
        f"{hero.name} loses {loss} of the {thing}.",
        f"Then {hero.he} sells {loss} {thing}.",
        f"{hero.name} uses {loss} of {hero.his} {thing}.",
    ])  # fmt: skip
    clause = f"{hero.name} has {{}} {thing} left"
    return told, Step(f"{have} - {loss}", have - loss, f"the number of {thing} that remain", clause, thing)


def _chain_multiply(rng: Random, hero: Person, thing: str, have: int) -> tuple[str, Step]:
    times = rng.choice([2, 2, 3, 4])
    told = rng.choice([
        f"By the next week {hero.he} has {TIMES_WORDS[times]} as many.",
        f"Then the number of {thing} grows to {TIMES_WORDS[times]} what it was.",
        f"Soon {hero.name} has {TIMES_WORDS[times]} as many {thing}.",
    ])  # fmt: skip
    clause = f"{hero.name} has {{}} {thing}"
    return told, Step(f"{have} * {times}", have * times, f"the number of {thing} after it grows", clause, thing)


def _chain_divide(rng: Random, hero: Person, thing: str, have: int) -> tuple[str, Step]:
    parts = rng.choice([d for d in (2, 3, 4, 5) if have % d == 0])
    told = rng.choice([
        f"{hero.name} keeps only {PART_WORDS[parts]} of them.",
        f"Then {hero.he} stays with {PART_WORDS[parts]} of the {thing}.",
        f"After a while just {PART_WORDS[parts]} of the {thing} are still there.",
    ])  # fmt: skip
    clause = f"{hero.name} keeps {{}} {thing}"
    return told, Step(f"{have} / {parts}", have // parts, f"{PART_WORDS[parts]} of the {thing}", clause, thing)


def chain(rng: Random) -> Story:
    """A stock of things goes up and down four to six times."""
    hero, thing = person(rng), rng.choice(THINGS)
    have = amount(rng, 40, 6000)
    told = [rng.choice([
        f"{hero.name} has {have} {thing}.",
        f"{hero.name} starts with {have} {thing}.",
        f"At first {hero.name} owns {have} {thing}.",
        f"In {hero.his} room {hero.name} keeps {have} {thing}.",
    ])]  # fmt: skip
    steps: list[Step] = []
    last: Callable[..., tuple[str, Step]] | None = None
    for _ in range(rng.randint(4, 6)):
        moves = [_chain_gain, _chain_loss, _chain_loss]
        moves += [_chain_multiply] if have < 6000 else []
        moves += [_chain_divide, _chain_divide] if have > 20 and any(have % d == 0 for d in (2, 3, 4, 5)) else []
        move = rng.choice([m for m in moves if m is not last])
        sentence, step = move(rng, hero, thing, have)
        told.append(sentence)
        steps.append(step)
        have, last = step.value, move
    asked = rng.choice([
        f"How many {thing} does {hero.name} have in the end?",
        f"How many {thing} are there now?",
        f"With how many {thing} does {hero.name} end up?",
    ])  # fmt: skip
    return Story(hero.name, told, asked, steps)


def _relation(rng: Random, a: Person, b: Person, thing: str, base: int) -> tuple[str, Step]:
    """How much `b` has, told relative to what `a` has."""
    what, clause = f"the number of {thing} of {b.name}", f"{b.name} has {{}} {thing}"
    kinds = ["more", "fewer", "times"] + [f"part{d}" for d in (2, 3, 4, 5) if base % d == 0]
    kind = rng.choice(kinds)
    if kind == "more":
        extra = amount(rng, 7, 4000)
        return f"{b.name} has {extra} more {thing} than {a.name}.", Step(
            f"{base} + {extra}", base + extra, what, clause, thing
        )
    if kind == "fewer":
        less = rng.randint(3, max(4, base * 2 // 3))
        return f"{b.name} has {less} fewer {thing} than {a.name}.", Step(
            f"{base} - {less}", base - less, what, clause, thing
        )
    if kind == "times":
        times = rng.choice([2, 3, 4, 5])
        return f"{b.name} has {TIMES_WORDS[times]} as many {thing} as {a.name}.", Step(
            f"{base} * {times}", base * times, what, clause, thing
        )
    parts = int(kind[4:])
    return f"{b.name} has {PART_WORDS[parts]} as many {thing} as {a.name}.", Step(
        f"{base} / {parts}", base // parts, what, clause, thing
    )


def compare(rng: Random) -> Story:
    """Three people whose amounts are told relative to each other; a total, a difference or an equal share is asked."""
    a, b, c = people(rng, 3)
    thing, base = rng.choice(THINGS), amount(rng, 40, 4000)
    told = [rng.choice([f"{a.name} has {base} {thing}.", f"{a.name} collected {base} {thing}."])]
    sentence, first = _relation(rng, a, b, thing, base)
    told.append(sentence)
    sentence, second = _relation(rng, b, c, thing, first.value)
    told.append(sentence)
    steps = [first, second]
    x, y = first.value, second.value
    ask = rng.choice(["total", "total", "difference", "share"])
    if ask == "difference" and y != base:
        low, high = sorted((base, y))
        steps.append(Step(f"{high} - {low}", high - low, "the difference", f"the difference is {{}} {thing}", thing))
        asked = f"What is the difference between the numbers of {thing} of {a.name} and {c.name}?"
        return Story(a.name, told, asked, steps)
    total, who = base + x, f"{a.name} and {b.name}"
    steps.append(Step(f"{base} + {x}", total, f"what {who} have", f"{who} have {{}} {thing}", thing))
    steps.append(
        Step(f"{total} + {y}", total + y, "the total for all three", f"all three have {{}} {thing} together", thing)
    )
    total += y
    groups = [g for g in range(3, 10) if total % g == 0]
    if ask == "share" and groups:
        group = rng.choice(groups)
        told.append(f"They put all of them together and split them equally among {group} children.")
        steps.append(
            Step(f"{total} / {group}", total // group, "one equal share", f"each child gets {{}} {thing}", thing)
        )
        return Story(a.name, told, f"How many {thing} does each child get?", steps)
    asked = rng.choice([f"How many {thing} do they have together?", f"How many {thing} do the three have in all?"])
    return Story(a.name, told, asked, steps)


def saving(rng: Random) -> Story:
    """Weeks, or the weekly amount, needed to pay for a wish."""
    hero, wish = person(rng), rng.choice(WISHES)
    per_week, weeks = rng.randint(4, 95), rng.randint(3, 24)
    need = per_week * weeks
    have = amount(rng, 5, 2000)
    gift = amount(rng, 5, 900) if rng.random() < 0.6 else 0
    price = need + have + gift
    told = [
        rng.choice([f"{hero.name} wants to buy {wish} that costs ${price}.", f"{wish.capitalize()} costs ${price}, and "
                    f"{hero.name} would like to have it."]),
        rng.choice([f"{hero.name} has already saved ${have}.", f"So far {hero.he} has ${have}."]),
    ]  # fmt: skip
    steps = [Step(f"{price} - {have}", price - have, "the money still missing", f"{hero.name} still needs {{}} dollars",
                  "dollars")]  # fmt: skip
    if gift:
        told.append(rng.choice([f"{hero.his.capitalize()} uncle gives {hero.name} ${gift} for it.",
                                f"For {hero.his} birthday {hero.he} gets ${gift}."]))  # fmt: skip
        steps.append(Step(f"{price - have} - {gift}", need, "the money needed after the gift",
                          "only {} dollars are missing", "dollars"))  # fmt: skip
    if rng.random() < 0.6:
        earn = per_week + (spend := rng.randint(2, 30))
        told.append(f"Each week {hero.he} earns ${earn} and spends ${spend} of it.")
        steps.append(Step(f"{earn} - {spend}", per_week, "what is put aside each week",
                          f"{hero.he} saves {{}} dollars a week", "dollars"))  # fmt: skip
        asked = rng.choice([f"How many weeks does {hero.name} have to save?",
                            f"After how many weeks can {hero.name} buy it?"])  # fmt: skip
        steps.append(Step(f"{need} / {per_week}", weeks, "the number of weeks", "it takes {} weeks", "weeks"))
    else:
        told.append(f"{hero.name} plans to save the same amount every week for {weeks} weeks.")
        asked = f"How many dollars must {hero.name} save each week?"
        steps.append(Step(f"{need} / {weeks}", per_week, "the amount for one week",
                          f"{hero.name} must save {{}} dollars a week", "dollars"))  # fmt: skip
    return Story(hero.name, told, asked, steps)


def shopping(rng: Random) -> Story:
    """Two kinds of goods, and the change from a sum of money."""
    hero = person(rng)
    (one_a, many_a), (one_b, many_b) = rng.sample(GOODS, 2)
    count_a, count_b = rng.randint(2, 9), rng.randint(2, 9)
    price_a, price_b = amount(rng, 3, 480), amount(rng, 3, 480)
    cost_a, cost_b = count_a * price_a, count_b * price_b
    total = cost_a + cost_b
    paid = total + amount(rng, 1, 3000)
    told = [
        rng.choice([f"{hero.name} buys {count_a} {many_a} and {count_b} {many_b}.",
                    f"In a shop {hero.name} takes {count_a} {many_a} and {count_b} {many_b}."]),
        rng.choice([f"One {one_a} costs ${price_a} and one {one_b} costs ${price_b}.",
                    f"A {one_a} is ${price_a}, and the price of each {one_b} is ${price_b}."]),
        rng.choice([f"{hero.name} has ${paid}.", f"{hero.name} came with ${paid}."]),
    ]  # fmt: skip
    steps = [
        Step(f"{count_a} * {price_a}", cost_a, f"the cost of the {many_a}", f"the {many_a} cost {{}} dollars",
             "dollars"),
        Step(f"{count_b} * {price_b}", cost_b, f"the cost of the {many_b}", f"the {many_b} cost {{}} dollars",
             "dollars"),
        Step(f"{cost_a} + {cost_b}", total, "the whole bill", f"{hero.name} pays {{}} dollars", "dollars"),
        Step(f"{paid} - {total}", paid - total, "the money left", f"{hero.name} has {{}} dollars left", "dollars"),
    ]  # fmt: skip
    asked = rng.choice(["How much money is left?", f"How many dollars does {hero.name} have after paying?"])
    return Story(hero.name, told, asked, steps)


def packing(rng: Random) -> Story:
    """Containers are filled, some things spoil, the rest is packed anew."""
    hero, thing, box = person(rng), rng.choice(THINGS), rng.choice(CONTAINERS)
    per_bag, bags = rng.randint(3, 12), amount(rng, 5, 400)
    good = per_bag * bags
    boxes = rng.randint(4, 14)
    per_box = good // boxes + amount(rng, 1, 90)
    total = boxes * per_box
    bad = total - good
    told = [
        rng.choice([f"{hero.name} has {boxes} {box} with {per_box} {thing} in each.",
                    f"There are {boxes} {box}, and each of them holds {per_box} {thing}."]),
        rng.choice([f"{bad} of the {thing} are damaged and thrown away.",
                    f"{hero.name} finds that {bad} {thing} are no good and removes them."]),
        rng.choice([f"The rest is put into packs of {per_bag}.",
                    f"{hero.name} puts the good ones into packs of {per_bag} {thing}."]),
    ]  # fmt: skip
    steps = [
        Step(f"{boxes} * {per_box}", total, f"the number of {thing} at the start", f"there are {{}} {thing} at first",
             thing),
        Step(f"{total} - {bad}", good, f"the number of good {thing}", f"{{}} {thing} are good", thing),
        Step(f"{good} / {per_bag}", bags, "the number of packs", f"{hero.name} gets {{}} packs", "packs"),
    ]  # fmt: skip
    return Story(hero.name, told, rng.choice(["How many packs are there?", "How many packs can be made?"]), steps)


def wages(rng: Random) -> Story:
    """Pay for normal and extra hours, less a cost."""
    hero = person(rng)
    rate, extra_rate = rng.randint(9, 38), rng.randint(12, 55)
    hours, extra = rng.randint(12, 44), rng.randint(2, 9)
    pay, extra_pay = rate * hours, extra_rate * extra
    cost = rng.randint(10, (pay + extra_pay) // 2)
    told = [
        rng.choice([f"{hero.name} earns ${rate} for each normal hour and ${extra_rate} for each extra hour.",
                    f"A normal hour brings {hero.name} ${rate}, an extra hour ${extra_rate}."]),
        f"This week {hero.he} works {hours} normal hours and {extra} extra hours.",
        rng.choice([f"{hero.he.capitalize()} spends ${cost} on rent and food.",
                    f"Of this {hero.he} must pay ${cost}."]),
    ]  # fmt: skip
    steps = [
        Step(f"{hours} * {rate}", pay, "the pay for normal hours", "the normal hours bring {} dollars", "dollars"),
        Step(f"{extra} * {extra_rate}", extra_pay, "the pay for extra hours", "the extra hours bring {} dollars",
             "dollars"),
        Step(f"{pay} + {extra_pay}", pay + extra_pay, "the whole pay", f"{hero.name} earns {{}} dollars", "dollars"),
        Step(f"{pay + extra_pay} - {cost}", pay + extra_pay - cost, "the money left", f"{hero.he} keeps {{}} dollars",
             "dollars"),
    ]  # fmt: skip
    return Story(hero.name, told, f"How many dollars does {hero.name} have left?", steps)


def travel(rng: Random) -> Story:
    """Two legs of a trip, and the distance or time that remains."""
    hero = person(rng)
    speed_a, speed_b = rng.randint(11, 95), rng.randint(11, 95)
    hours_a, hours_b = rng.randint(2, 8), rng.randint(2, 8)
    leg_a, leg_b = speed_a * hours_a, speed_b * hours_b
    pace, rest_hours = rng.randint(6, 60), rng.randint(2, 9)
    whole = leg_a + leg_b + pace * rest_hours
    told = [
        f"{hero.name} makes a trip of {whole} miles.",
        rng.choice([f"First {hero.he} travels {hours_a} hours at {speed_a} miles per hour.",
                    f"For the first {hours_a} hours {hero.his} speed is {speed_a} miles per hour."]),
        rng.choice([f"Then {hero.he} goes on for {hours_b} hours at {speed_b} miles per hour.",
                    f"For the next {hours_b} hours it is {speed_b} miles per hour."]),
    ]  # fmt: skip
    steps = [
        Step(f"{hours_a} * {speed_a}", leg_a, "the first part", "the first part is {} miles", "miles"),
        Step(f"{hours_b} * {speed_b}", leg_b, "the second part", "the second part is {} miles", "miles"),
        Step(f"{leg_a} + {leg_b}", leg_a + leg_b, "the distance so far", f"{hero.name} has gone {{}} miles", "miles"),
        Step(f"{whole} - {leg_a + leg_b}", pace * rest_hours, "the distance that remains", "{} miles remain",
             "miles"),
    ]  # fmt: skip
    if rng.random() < 0.5:
        return Story(hero.name, told, f"How many miles does {hero.name} still have to go?", steps)
    told.append(f"The rest of the way {hero.he} goes {pace} miles per hour.")
    steps.append(
        Step(f"{pace * rest_hours} / {pace}", rest_hours, "the time for the rest", "the rest takes {} hours",
             "hours")
    )  # fmt: skip
    return Story(hero.name, told, "How many hours does the rest of the way take?", steps)


def reading(rng: Random) -> Story:
    """Pages read over days, and the days needed for the rest."""
    hero = person(rng)
    days, pages = rng.randint(3, 12), rng.randint(11, 95)
    pace, rest_days = rng.randint(6, 40), rng.randint(3, 20)
    done, rest = days * pages, pace * rest_days
    book = done + rest
    told = [
        rng.choice([f"{hero.name} reads a book with {book} pages.", f"The new book of {hero.name} has {book} pages."]),
        rng.choice([f"In the first {days} days {hero.he} reads {pages} pages a day.",
                    f"{hero.he.capitalize()} reads {pages} pages on each of the first {days} days."]),
        rng.choice([f"After that {hero.he} reads {pace} pages a day.",
                    f"Then {hero.he} changes to {pace} pages each day."]),
    ]  # fmt: skip
    steps = [
        Step(f"{days} * {pages}", done, "the number of pages read first", f"{hero.name} reads {{}} pages at first",
             "pages"),
        Step(f"{book} - {done}", rest, "the number of pages left", "{} pages are left", "pages"),
        Step(f"{rest} / {pace}", rest_days, "the number of days for the rest", "the rest takes {} days", "days"),
    ]  # fmt: skip
    if rng.random() < 0.5:
        return Story(hero.name, told, "How many more days are needed for the rest of the book?", steps)
    steps.append(Step(f"{days} + {rest_days}", days + rest_days, "the number of days in all",
                      "the book takes {} days", "days"))  # fmt: skip
    return Story(hero.name, told, f"How many days does {hero.name} need for the whole book?", steps)


def fractions(rng: Random) -> Story:
    """A part of a group is taken away, then a part of the rest."""
    hero, thing = person(rng), rng.choice(THINGS)
    first, second = rng.choice([2, 3, 4, 5]), rng.choice([2, 3, 4])
    # The rest after the first part must be a multiple of `second`, and the whole one of `first`.
    whole = first * second * amount(rng, 4, 400)
    part = whole // first
    rest = whole - part
    taken = rest // second
    told = [
        rng.choice([f"{hero.name} has {whole} {thing}.", f"There are {whole} {thing} on the table of {hero.name}."]),
        rng.choice([f"{hero.he.capitalize()} gives {PART_WORDS[first]} of them to a neighbor.",
                    f"{PART_WORDS[first].capitalize()} of them go to a school."]),
        rng.choice([f"Then {hero.he} sells {PART_WORDS[second]} of the rest.",
                    f"Of what remains, {PART_WORDS[second]} is sold."]),
    ]  # fmt: skip
    steps = [
        Step(f"{whole} / {first}", part, f"{PART_WORDS[first]} of the {thing}", f"{{}} {thing} are given away", thing),
        Step(f"{whole} - {part}", rest, "the rest after that", f"{{}} {thing} remain", thing),
        Step(f"{rest} / {second}", taken, "the number sold", f"{hero.name} sells {{}} {thing}", thing),
        Step(f"{rest} - {taken}", rest - taken, "what is left at last", f"{hero.name} has {{}} {thing} left", thing),
    ]  # fmt: skip
    return Story(hero.name, told, f"How many {thing} are left at the end?", steps)


def harvest(rng: Random) -> Story:
    """Rows of plants give fruit; some is eaten, the rest is shared."""
    hero = person(rng)
    helpers, share = rng.randint(3, 9), amount(rng, 11, 400)
    good = helpers * share
    rows, plants = rng.randint(4, 16), rng.randint(6, 24)
    fields = rows * plants
    told = [
        rng.choice([f"{hero.name} plants {rows} rows with {plants} plants in each row.",
                    f"In the garden of {hero.name} there are {rows} rows of {plants} plants."]),
    ]  # fmt: skip
    each = good // fields + rng.randint(1, 3)
    total = fields * each
    eaten = total - good
    told += [
        f"Every plant gives {each} tomatoes." if each > 1 else "Every plant gives 1 tomato.",
        rng.choice([f"Birds and insects spoil {eaten} tomatoes.", f"{eaten} tomatoes are eaten on the spot."]),
        f"The others are shared equally among {helpers} helpers.",
    ]
    steps = [
        Step(f"{rows} * {plants}", fields, "the number of plants", "there are {} plants", "plants"),
        Step(f"{fields} * {each}", total, "the whole harvest", "the plants give {} tomatoes", "tomatoes"),
        Step(f"{total} - {eaten}", good, "what can be shared", "{} tomatoes can be shared", "tomatoes"),
        Step(f"{good} / {helpers}", share, "the share of one helper", "each helper gets {} tomatoes", "tomatoes"),
    ]
    return Story(hero.name, told, "How many tomatoes does each helper get?", steps)


def ages(rng: Random) -> Story:
    """Ages of a family, told relative to each other."""
    a, b, c = people(rng, 3)
    age = rng.randint(6, 24)
    older, times, years = rng.randint(2, 19), rng.choice([2, 3, 4]), rng.randint(2, 15)
    b_age = age + older
    c_age = b_age * times if b_age * times < 99 else b_age + 20
    told = [f"{a.name} is {age} years old.", f"{b.name} is {older} years older than {a.name}."]
    if c_age == b_age * times:
        told.append(f"{c.name} is {TIMES_WORDS[times]} as old as {b.name}.")
        c_step = Step(f"{b_age} * {times}", c_age, f"the age of {c.name}", f"{c.name} is {{}} years old", "years")
    else:
        told.append(f"{c.name} is 20 years older than {b.name}.")
        c_step = Step(f"{b_age} + 20", c_age, f"the age of {c.name}", f"{c.name} is {{}} years old", "years")
    b_step = Step(f"{age} + {older}", b_age, f"the age of {b.name}", f"{b.name} is {{}} years old", "years")
    if rng.random() < 0.5:
        asked = f"How old will {c.name} be in {years} years?"
        last = Step(f"{c_age} + {years}", c_age + years, f"the age of {c.name} in {years} years",
                    f"{c.name} will be {{}} years old", "years")  # fmt: skip
        return Story(a.name, told, asked, [b_step, c_step, last])
    asked = f"How many years older is {c.name} than {a.name}?"
    last = Step(f"{c_age} - {age}", c_age - age, "the difference in age", f"{c.name} is {{}} years older", "years")
    return Story(a.name, told, asked, [b_step, c_step, last])


def teams(rng: Random) -> Story:
    """Children of several classes, some absent, form equal teams."""
    hero = person(rng)
    size, count = rng.randint(3, 12), rng.randint(5, 16)
    present = size * count
    girls = rng.randint(present // 4, present // 2)
    absent = rng.randint(2, 19)
    boys = present + absent - girls
    told = [
        rng.choice([f"{hero.name} invites {girls} girls and {boys} boys to a sports day.",
                    f"{girls} girls and {boys} boys sign up for the sports day that {hero.name} plans."]),
        rng.choice([f"{absent} of the children are ill and stay at home.",
                    f"On that day {absent} children are absent."]),
    ]  # fmt: skip
    steps = [
        Step(f"{girls} + {boys}", girls + boys, "the number of all children", "{} children are on the list",
             "children"),
        Step(f"{girls + boys} - {absent}", present, "the number of children present", "{} children come",
             "children"),
    ]  # fmt: skip
    if rng.random() < 0.5:
        told.append(f"The others form teams of {size}.")
        steps.append(Step(f"{present} / {size}", count, "the number of teams", "there are {} teams", "teams"))
        return Story(hero.name, told, "How many teams are there?", steps)
    told.append(f"The others form {count} equal teams.")
    steps.append(Step(f"{present} / {count}", size, "the size of a team", "each team has {} children", "children"))
    return Story(hero.name, told, "How many children are in each team?", steps)


def tank(rng: Random) -> Story:
    """Water flows in and out of a tank."""
    hero = person(rng)
    fill, leak = rng.randint(14, 60), rng.randint(2, 12)
    net, minutes = fill - leak, rng.randint(4, 30)
    have = amount(rng, 10, 3000)
    full = have + net * minutes
    told = [
        rng.choice([f"The tank of {hero.name} holds {full} liters.", f"{hero.name} has a tank for {full} liters."]),
        rng.choice([f"There are {have} liters in it.", f"At the moment {have} liters are in it."]),
        f"A pipe adds {fill} liters each minute, but {leak} liters leak out each minute.",
    ]  # fmt: skip
    steps = [
        Step(f"{full} - {have}", net * minutes, "the water that is missing", "{} liters are missing", "liters"),
        Step(f"{fill} - {leak}", net, "the gain of each minute", "the tank gains {} liters a minute", "liters"),
        Step(f"{net * minutes} / {net}", minutes, "the number of minutes", "it takes {} minutes", "minutes"),
    ]  # fmt: skip
    return Story(hero.name, told, "After how many minutes is the tank full?", steps)


def discount(rng: Random) -> Story:
    """Several pieces of one good with a percentage off."""
    hero, (one, many) = person(rng), rng.choice(GOODS)
    percent = rng.choice([10, 20, 25, 50])
    count = rng.randint(2, 9)
    price = amount(rng, 2, 90) * {10: 10, 20: 5, 25: 4, 50: 2}[percent]
    divisor = 100 // percent
    total = count * price
    off = total // divisor
    told = [
        f"{hero.name} buys {count} {many}.",
        rng.choice([f"Each {one} costs ${price}.",
                    f"The price of one {one} is ${price}."]),
        rng.choice([f"Today the shop takes {percent} percent off.",
                    f"{hero.name} gets a discount of {percent} percent."]),
    ]  # fmt: skip
    steps = [
        Step(f"{count} * {price}", total, "the full price", f"the {many} cost {{}} dollars", "dollars"),
        Step(f"{total} / {divisor}", off, "the discount", "the discount is {} dollars", "dollars"),
        Step(f"{total} - {off}", total - off, "the price to pay", f"{hero.name} pays {{}} dollars", "dollars"),
    ]
    return Story(hero.name, told, f"How many dollars does {hero.name} pay?", steps)


def factory(rng: Random) -> Story:
    """Machines make parts, some fail, the rest goes into cartons."""
    hero = person(rng)
    machines, per_hour, hours = rng.randint(2, 9), amount(rng, 4, 90), rng.randint(2, 9)
    total = machines * per_hour * hours
    carton = rng.randint(3, 12)
    cartons = max(1, (total - rng.randint(1, max(1, total // 5))) // carton)
    good = carton * cartons
    told = [
        rng.choice([f"{hero.name} runs {machines} machines.", f"In the factory of {hero.name} there are {machines} "
                    "machines."]),
        f"Each machine makes {per_hour} parts per hour and runs for {hours} hours.",
        f"{total - good} parts fail the test.",
        rng.choice([f"The good parts are packed in cartons of {carton}.", f"A carton holds {carton} good parts."]),
    ]  # fmt: skip
    steps = [
        Step(f"{machines} * {per_hour}", machines * per_hour, "the output of one hour", "one hour gives {} parts",
             "parts"),
        Step(f"{machines * per_hour} * {hours}", total, "the whole output", "the machines make {} parts", "parts"),
        Step(f"{total} - {total - good}", good, "the number of good parts", "{} parts are good", "parts"),
        Step(f"{good} / {carton}", cartons, "the number of cartons", f"{hero.name} fills {{}} cartons", "cartons"),
    ]  # fmt: skip
    return Story(hero.name, told, "How many cartons are filled?", steps)


def tickets(rng: Random) -> Story:
    """Ticket sales on two prices, against the costs of a show."""
    hero = person(rng)
    adults, children = rng.randint(12, 95), amount(rng, 8, 600)
    price_a, price_c = rng.randint(6, 25), rng.randint(2, 9)
    sales_a, sales_c = adults * price_a, children * price_c
    total = sales_a + sales_c
    cost = rng.randint(20, max(21, total - 10))
    told = [
        rng.choice([f"{hero.name} sells tickets for a show.", f"A show is put on by {hero.name}."]),
        f"Adults pay ${price_a} and children pay ${price_c}.",
        rng.choice([f"{adults} adults and {children} children come.",
                    f"The show is seen by {adults} adults and {children} children."]),
        rng.choice([f"The hall costs ${cost}.", f"{hero.name} has to pay ${cost} for the hall."]),
    ]  # fmt: skip
    high, low = max(total, cost), min(total, cost)
    steps = [
        Step(f"{adults} * {price_a}", sales_a, "the money from adults", "the adults pay {} dollars", "dollars"),
        Step(f"{children} * {price_c}", sales_c, "the money from children", "the children pay {} dollars",
             "dollars"),
        Step(f"{sales_a} + {sales_c}", total, "all ticket money", "the tickets bring {} dollars", "dollars"),
        Step(f"{high} - {low}", high - low, "the amount that remains", f"{hero.name} is left with {{}} dollars",
             "dollars"),
    ]  # fmt: skip
    return Story(hero.name, told, f"How many dollars are left for {hero.name}?", steps)


def bill(rng: Random) -> Story:
    """A restaurant bill with a coupon, split among friends."""
    hero = person(rng)
    friends, meals, price = rng.randint(2, 9), rng.randint(2, 9), amount(rng, 6, 300)
    food = meals * price
    drinks = amount(rng, 6, 900)
    gross = food + drinks
    share = max(1, gross // friends + rng.randint(-20, 30))
    due = friends * share
    told = [
        rng.choice([f"{hero.name} and some friends order {meals} meals for ${price} each.",
                    f"At dinner the group of {hero.name} has {meals} meals, and each costs ${price}."]),
        f"Their drinks cost ${drinks} in all.",
    ]  # fmt: skip
    steps = [
        Step(f"{meals} * {price}", food, "the cost of the meals", "the meals cost {} dollars", "dollars"),
        Step(f"{food} + {drinks}", gross, "the bill for food and drinks", "the bill is {} dollars", "dollars"),
    ]
    if gross > due:
        told.append(rng.choice([f"A coupon takes ${gross - due} off.", f"They have a coupon worth ${gross - due}."]))
        steps.append(Step(f"{gross} - {gross - due}", due, "the bill after the coupon",
                          "they have to pay {} dollars", "dollars"))  # fmt: skip
    elif gross < due:
        told.append(f"They also leave a tip of ${due - gross}.")
        steps.append(Step(f"{gross} + {due - gross}", due, "the bill with the tip", "they pay {} dollars",
                          "dollars"))  # fmt: skip
    told.append(f"The {friends} people at the table share the sum equally.")
    steps.append(Step(f"{due} / {friends}", share, "the part of one person", "each person pays {} dollars",
                      "dollars"))  # fmt: skip
    return Story(hero.name, told, "How many dollars does each person pay?", steps)


# Plot -> weight. Plots with long dependent arithmetic are drawn more often: they hold most mistakes.
PLOT_WEIGHTS: dict[Callable[[Random], Story], int] = {
    chain: 4, compare: 4, saving: 3, shopping: 2, packing: 2, wages: 2, travel: 2, reading: 2, fractions: 2,
    harvest: 1, ages: 1, teams: 1, tank: 1, discount: 1, factory: 1, tickets: 2, bill: 2,
}  # fmt: skip
