"""Made-up listening questions in MMAU's schema, each with its clip and the answer the model is taught.

    python -m tools.nano.listening --count 8                                   # prints rows of the training stream
    python -m tools.nano.listening --write specbench/assets/nano_audio         # the packaged rows with their clips

What belongs here: what is asked about the sounds of `sounds.py`, and in which words. An answer says what is heard in
words that are in no choice, then `Answer: CHOICE`, so that MMAU's own matcher (every token of the right choice, none of
another's) takes it. Everything is drawn from one `random.Random` an item, seeded by (seed, index).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from tools.nano import sounds
from tools.nano.sounds import Waveform

TRAIN_SEED = 11
HELD_OUT_SEED = 12
NUM_HELD_OUT_ITEMS = 240
DATASET = "nano_audio"
ANSWER_MARK = "Answer:"

NUMBERS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six")
ORDINALS = ("First", "Second", "Third", "Fourth")
# What each thing sounds like: words for the answer that are in no choice.
INSTRUMENT_SOUND = {"Flute": "soft", "Clarinet": "hollow", "Violin": "bright", "Guitar": "plucked", "Bell": "ringing",
                    "Drum": "dry"}  # fmt: skip
EVENT_SOUND = {"Beep": "pure", "Hiss": "airy", "Siren": "wavering", "Click": "sharp", "Rumble": "deep",
               "Chirp": "darting", "Buzz": "rough", "Knock": "dull"}  # fmt: skip
BACKGROUND_SOUND = {"Rain": "pattering", "Wind": "blowing", "Engine": "humming", "Silence": "empty"}
VOWEL_NAMES = {"a": "Ah", "e": "Eh", "i": "Ee", "o": "Oh", "u": "Oo"}
VOWEL_SOUND = {"a": "open", "e": "plain", "i": "thin", "o": "round", "u": "dark"}
SPEAKER_SOUND = {"Man": "deep", "Woman": "warm", "Child": "tiny", "Robot": "metallic"}

# Drawn evenly and starting with different words, as in `phrasing.py`: a draft can't know which one comes.
OPENINGS = (
    "Let me hear it again.",
    "This clip is short.",
    "Now I listen closely.",
    "All of it is clear.",
    "What matters comes early on.",
    "Here is what I notice.",
)
STARTERS = ("", "So ", "Then ", "Now ", "Here ", "Thus ", "Hence ", "Clearly ", "Again ", "Surely ", "Plainly ",
            "Indeed ", "Overall ", "Once more ", "It follows that ", "From this ", "With this ",
            "Of course ")  # fmt: skip
REMARKS = (
    "Nothing else matters here.",
    "That settles it.",
    "The rest is easy.",
    "I am sure of that.",
    "No other choice fits.",
    "Everything agrees with this.",
)
FORMS = ("{subject} {verb} {heard}", "{heard} {is_what} {subject}")
VERBS = ("comes as", "sounds like", "goes", "may be noted as", "can be put as", "amounts to")
IS_WHAT = ("is how I hear", "is what I note of", "describes", "stands for", "sums up")


@dataclass(frozen=True)
class Heard:
    """A question about a clip, before it is worded: `heard` are the words for what `subject` sounds like."""

    wave: Waveform
    questions: tuple[str, ...]
    gold: str
    # The other choices, at most `num_choices - 1` of which are shown.
    others: tuple[str, ...]
    subject: str
    heard: tuple[str, ...]
    difficulty: str


@dataclass(frozen=True)
class Kind:
    """One kind of question and its place in MMAU's groupings."""

    task: str
    category: str
    sub_category: str
    make: Callable[[Random], Heard]


@dataclass(frozen=True)
class Item:
    """One row, its clip and the taught answer."""

    # MMAU's keys, without id and audio_id
    row: dict[str, object]
    # [samples] int8 at 16 kHz
    clip: np.ndarray
    answer: str

    @property
    def digest(self) -> int:
        """64 bits of the clip's hash: two items with one digest have the same clip."""
        return int.from_bytes(hashlib.blake2b(self.clip.tobytes(), digest_size=8).digest(), "little")


def pick_others(rng: Random, pool: Iterable[str], gold: str, count: int = 3) -> tuple[str, ...]:
    others = sorted(set(pool) - {gold})
    return tuple(rng.sample(others, min(count, len(others))))


def near_numbers(rng: Random, gold: int) -> tuple[str, ...]:
    """Other numbers from one to six."""
    return pick_others(rng, NUMBERS[1:], NUMBERS[gold])


# ---- music


def _notes(rng: Random, semitones: Sequence[int], seconds: float, gap: float = 0.03) -> Waveform:
    play = rng.choice(sounds.MELODIC)
    base = rng.uniform(330.0, 480.0)
    parts = [play(rng, base * 2 ** (step / 12), seconds) for step in semitones]
    return sounds.sequence(parts, [gap] * (len(parts) - 1))


def contour(rng: Random) -> Heard:
    shape = rng.choice(["Rising", "Falling", "Peak", "Dip", "Level"])
    count = rng.randint(3, 5) if shape in ("Rising", "Falling", "Level") else rng.randint(4, 6)
    turn = rng.randint(2, count - 2) if shape in ("Peak", "Dip") else 0
    signs = {"Rising": [1] * (count - 1), "Falling": [-1] * (count - 1), "Level": [0] * (count - 1)}.get(shape)
    if signs is None:
        first = 1 if shape == "Peak" else -1
        signs = [first if index < turn else -first for index in range(count - 1)]
    steps = [0]
    for sign in signs:
        steps.append(steps[-1] + sign * rng.randint(2, 4))
    words = {1: "up", -1: "down", 0: "same"}
    return Heard(
        _notes(rng, steps, rng.uniform(0.19, 0.26)),
        ("What shape does the melody have?", "Which word describes the melody's contour?", "How does the melody move?"),
        shape, ("Rising", "Falling", "Peak", "Dip", "Level"), "the line of notes",
        tuple(words[sign] for sign in signs), "medium" if shape in ("Peak", "Dip") else "easy",
    )  # fmt: skip


def higher_note(rng: Random) -> Heard:
    gold = rng.choice(["First", "Second", "Equal"])
    step = {"First": -1, "Second": 1, "Equal": 0}[gold] * rng.randint(1, 7)
    heard = {"First": ("top", "low"), "Second": ("low", "top"), "Equal": ("same", "same")}[gold]
    return Heard(
        _notes(rng, [0, step], rng.uniform(0.25, 0.45), rng.uniform(0.05, 0.2)),
        ("Which of the two notes is higher?", "Two notes are played. Which one has the higher pitch?"),
        gold, ("First", "Second", "Equal"), "the pair of notes", heard, "hard" if abs(step) == 1 else "easy",
    )  # fmt: skip


def highest_note(rng: Random) -> Heard:
    count = rng.randint(3, 4)
    place = rng.randrange(count)
    steps = [rng.randint(0, 5) for _ in range(count)]
    steps[place] = rng.randint(8, 12)
    return Heard(
        _notes(rng, steps, rng.uniform(0.22, 0.34)),
        ("Which note is the highest?", "At which place is the note with the highest pitch?"),
        ORDINALS[place], ORDINALS[:count], "the row of notes",
        tuple("top" if index == place else "low" for index in range(count)), "medium",
    )  # fmt: skip


def note_count(rng: Random) -> Heard:
    count = rng.randint(1, 6)
    step = rng.choice([0, 1, 2, -1])
    wave = _notes(rng, [step * index for index in range(count)], rng.uniform(0.13, 0.2), rng.uniform(0.06, 0.11))
    return Heard(
        wave, ("How many notes are played?", "Count the notes in the clip.", "How many notes can be heard?"),
        NUMBERS[count], near_numbers(rng, count), "the row of notes", ("ta",) * count, "easy",
    )  # fmt: skip


def tempo(rng: Random) -> Heard:
    gold = rng.choice(["Faster", "Slower", "Steady"])
    count = rng.randint(5, 6)
    ratio = rng.uniform(0.68, 0.78)
    gaps = [rng.uniform(0.36, 0.44) * ratio**index for index in range(count - 1)]
    if gold == "Slower":
        gaps.reverse()
    if gold == "Steady":
        gaps = [rng.uniform(0.16, 0.36)] * (count - 1)
    beat = rng.choice([sounds.knock, sounds.click])(rng, 0.08)
    wave = sounds.sequence([beat] * count, [max(0.03, gap - beat.size / sounds.RATE) for gap in gaps])
    words = tuple("wide" if gap > 0.28 else "mid" if gap > 0.18 else "tight" for gap in gaps)
    return Heard(
        wave,
        ("How does the tempo change?", "Does the beat change its speed?", "What happens to the tempo of the beat?"),
        gold, ("Faster", "Slower", "Steady"), "the space between beats", words, "medium",
    )  # fmt: skip


CHORDS = {"Major": ((0, 4, 7), ("wide", "close")), "Minor": ((0, 3, 7), ("close", "wide")),
          "Octave": ((0, 12), ("twofold",)), "Fifth": ((0, 7), ("hollow",))}  # fmt: skip


def _together(rng: Random, semitones: Sequence[int], seconds: float) -> Waveform:
    play = rng.choice([sounds.flute, sounds.flute, sounds.guitar])
    base = rng.uniform(400.0, 620.0)
    return sounds.mixed([play(rng, base * 2 ** (step / 12), seconds) for step in semitones])


def chord(rng: Random) -> Heard:
    gold = rng.choice(list(CHORDS))
    steps, heard = CHORDS[gold]
    return Heard(
        _together(rng, steps, rng.uniform(0.5, 0.9)),
        ("What kind of chord is played?", "Which harmony do the notes form?", "Which chord is it?"),
        gold, tuple(CHORDS), "the harmony", heard, "hard",
    )  # fmt: skip


def texture(rng: Random) -> Heard:
    count = rng.randint(1, 4)
    steps = {1: (0,), 2: (0, 7), 3: (0, 4, 7), 4: (0, 4, 7, 12)}[count]
    return Heard(
        _together(rng, steps, rng.uniform(0.5, 0.9)),
        ("How many notes sound at once?", "How many notes sound together?"),
        NUMBERS[count], NUMBERS[1:5], "the texture", ("voice",) * count, "hard",
    )  # fmt: skip


def instrument(rng: Random) -> Heard:
    gold = rng.choice(list(sounds.INSTRUMENTS))
    hertz, count = rng.uniform(300.0, 600.0), rng.randint(1, 2)
    parts = [sounds.INSTRUMENTS[gold](rng, hertz * 2 ** (rng.randint(-3, 5) / 12), rng.uniform(0.3, 0.6))
             for _ in range(count)]  # fmt: skip
    return Heard(
        sounds.sequence(parts, [rng.uniform(0.03, 0.1)] * (count - 1)),
        ("Which instrument is played?", "What instrument do you hear?", "Identify the instrument."),
        gold, pick_others(rng, sounds.INSTRUMENTS, gold), "the tone", (INSTRUMENT_SOUND[gold],), "easy",
    )  # fmt: skip


# ---- sound


def _event(rng: Random, name: str, seconds: float | None = None) -> Waveform:
    return sounds.EVENTS[name](rng, rng.uniform(0.22, 0.4) if seconds is None else seconds)


def _events(rng: Random, names: Sequence[str]) -> Waveform:
    parts = [_event(rng, name) for name in names]
    return sounds.sequence(parts, [rng.uniform(0.1, 0.2) for _ in parts[1:]])


def event(rng: Random) -> Heard:
    gold = rng.choice(list(sounds.EVENTS))
    return Heard(
        _event(rng, gold, rng.uniform(0.3, 0.8)),
        ("Which sound is heard?", "What do you hear in the clip?", "Identify the sound in the audio."),
        gold, pick_others(rng, sounds.EVENTS, gold), "the sound", (EVENT_SOUND[gold],), "easy",
    )  # fmt: skip


def event_order(rng: Random) -> Heard:
    names = rng.sample(list(sounds.EVENTS), rng.randint(2, 4))
    is_last = rng.random() < 0.5
    gold = names[-1 if is_last else 0]
    asked = ("Which sound comes last?", "What is heard at the end?") if is_last else (
        "Which sound comes first?", "What is heard at the beginning?")  # fmt: skip
    others = [name for name in names if name != gold]
    spare = pick_others(rng, sounds.EVENTS, gold, 8)
    others += [name for name in spare if name not in others]
    return Heard(
        _events(rng, names), asked, gold, tuple(others[:3]), "the order",
        tuple(EVENT_SOUND[name] for name in names), "medium" if len(names) < 4 else "hard",
    )  # fmt: skip


def event_missing(rng: Random) -> Heard:
    *names, gold = rng.sample(list(sounds.EVENTS), 4)
    return Heard(
        _events(rng, names), ("Which of these sounds is not heard?", "Which sound is missing from the clip?"),
        gold, tuple(names), "the clip", tuple(EVENT_SOUND[name] for name in names), "hard",
    )  # fmt: skip


def event_twice(rng: Random) -> Heard:
    gold, other, *more = rng.sample(list(sounds.EVENTS), 4)
    names = rng.choice([[gold, gold, other], [gold, other, gold], [other, gold, gold], [other, gold, more[0], gold]])
    return Heard(
        _events(rng, names), ("Which sound occurs twice?", "Which sound is repeated?"),
        gold, (other, *more), "the clip", tuple(EVENT_SOUND[name] for name in names), "hard",
    )  # fmt: skip


def event_count(rng: Random) -> Heard:
    name, count = rng.choice(["Beep", "Knock", "Click", "Chirp", "Buzz"]), rng.randint(1, 6)
    seconds, gap = rng.uniform(0.1, 0.16), rng.uniform(0.12, 0.18)
    parts = [_event(rng, name, seconds)] * count
    plural = {"Beep": "beeps", "Knock": "knocks", "Click": "clicks", "Chirp": "chirps", "Buzz": "buzzes"}[name]
    return Heard(
        sounds.sequence(parts, [gap] * (count - 1)),
        (f"How many {plural} are heard?", f"Count the {plural}.", f"How many {plural} does the clip have?"),
        NUMBERS[count], near_numbers(rng, count), "the row of sounds", ("tap",) * count, "easy",
    )  # fmt: skip


LOUDNESS = {
    "Grows": ("quiet", "mid", "strong"), "Fades": ("strong", "mid", "quiet"),
    "Constant": ("even", "even", "even"), "Pulsing": ("strong", "quiet", "strong", "quiet"),
}  # fmt: skip


def loudness(rng: Random) -> Heard:
    gold, seconds = rng.choice(list(LOUDNESS)), rng.uniform(0.8, 1.5)
    time = np.linspace(0.0, 1.0, sounds.num_samples(seconds))
    envelope = {
        "Grows": 0.03 ** (1.0 - time), "Fades": 0.03**time, "Constant": np.ones_like(time),
        "Pulsing": np.where((time * 4).astype(int) % 2 == 0, 1.0, 0.08),
    }[gold]  # fmt: skip
    wave = _event(rng, rng.choice(["Beep", "Hiss", "Rumble", "Buzz"]), seconds)[: time.size] * envelope
    return Heard(
        wave.astype(np.float32), ("How does the loudness change?", "What happens to the volume of the sound?"),
        gold, tuple(LOUDNESS), "the volume", LOUDNESS[gold], "medium",
    )  # fmt: skip


def background(rng: Random) -> Heard:
    gold, seconds = rng.choice([*sounds.BACKGROUNDS, "Silence"]), rng.uniform(0.9, 1.6)
    front = sounds.silence(seconds)
    for _ in range(rng.randint(1, 3)):
        part = _event(rng, rng.choice(["Beep", "Knock", "Chirp"]), 0.15)
        start = rng.randrange(front.size - part.size)
        front[start : start + part.size] += part
    level = rng.uniform(0.25, 0.6)
    behind = sounds.silence(seconds) if gold == "Silence" else sounds.BACKGROUNDS[gold](rng, seconds)
    return Heard(
        front + level * behind,
        ("What is heard in the background?", "Which scene is behind the sounds in front?"),
        gold, (*sounds.BACKGROUNDS, "Silence"), "the scene", (BACKGROUND_SOUND[gold],), "medium",
    )  # fmt: skip


# ---- speech


def vowel(rng: Random) -> Heard:
    gold, who = rng.choice(list(sounds.VOWELS)), rng.choice(list(sounds.SPEAKERS))
    return Heard(
        sounds.spoken(rng, who, gold, rng.uniform(0.4, 0.7)),
        ("Which vowel is spoken?", "What vowel does the speaker say?"),
        VOWEL_NAMES[gold], pick_others(rng, VOWEL_NAMES.values(), VOWEL_NAMES[gold]), "the vowel",
        (VOWEL_SOUND[gold],), "medium",
    )  # fmt: skip


def vowel_sequence(rng: Random) -> Heard:
    who, count = rng.choice(list(sounds.SPEAKERS)), rng.randint(2, 3)
    letters = [rng.choice(list(sounds.VOWELS)) for _ in range(count)]
    gold = "".join(letters).upper()
    others: set[str] = set()
    while len(others) < 3:
        changed = list(letters)
        if rng.random() < 0.5:
            rng.shuffle(changed)
        else:
            changed[rng.randrange(count)] = rng.choice(list(sounds.VOWELS))
        others |= {"".join(changed).upper()} - {gold}
    parts = [sounds.spoken(rng, who, letter, rng.uniform(0.28, 0.4)) for letter in letters]
    return Heard(
        sounds.sequence(parts, [rng.uniform(0.06, 0.12) for _ in parts[1:]]),
        ("Which vowels are spoken, in order?", "Which sequence of vowels does the speaker say?"),
        gold, tuple(sorted(others)), "the speech", tuple(VOWEL_SOUND[letter] for letter in letters), "hard",
    )  # fmt: skip


def _syllables(rng: Random, who: str, seconds: Sequence[float], levels: Sequence[float], lifts: Sequence[float],
               gap: float) -> Waveform:  # fmt: skip
    low, high, stretch = sounds.SPEAKERS[who]
    pitch, letter = rng.uniform(low, high), rng.choice(list(sounds.VOWELS))
    parts = [level * sounds.syllable(letter, sounds.gliding(pitch * lift, pitch * lift * 0.97, length), stretch)
             for length, level, lift in zip(seconds, levels, lifts, strict=True)]  # fmt: skip
    return sounds.sequence(parts, [gap] * (len(parts) - 1))


def stress(rng: Random) -> Heard:
    count = rng.randint(2, 4)
    place = rng.randrange(count)
    is_strong = [index == place for index in range(count)]
    wave = _syllables(
        rng, rng.choice(list(sounds.SPEAKERS)), [0.3 if strong else 0.18 for strong in is_strong],
        [1.0 if strong else 0.35 for strong in is_strong], [1.15 if strong else 1.0 for strong in is_strong],
        rng.uniform(0.06, 0.1),
    )  # fmt: skip
    return Heard(
        wave, ("Which syllable is stressed?", "On which syllable is the stress?"), ORDINALS[place],
        ORDINALS[: max(3, count)], "the word", tuple("DUM" if strong else "da" for strong in is_strong), "medium",
    )  # fmt: skip


def syllable_count(rng: Random) -> Heard:
    count = rng.randint(1, 6)
    seconds = rng.uniform(0.14, 0.19)
    wave = _syllables(rng, rng.choice(list(sounds.SPEAKERS)), [seconds] * count, [1.0] * count,
                      [rng.uniform(0.95, 1.05) for _ in range(count)], rng.uniform(0.08, 0.12))  # fmt: skip
    return Heard(
        wave, ("How many syllables are spoken?", "Count the syllables.", "How many syllables does the word have?"),
        NUMBERS[count], near_numbers(rng, count), "the word", ("da",) * count, "easy",
    )  # fmt: skip


INTONATION = {"Question": (1.45, "up"), "Statement": (0.68, "down"), "Monotone": (1.0, "flat")}


def intonation(rng: Random) -> Heard:
    gold = rng.choice(list(INTONATION))
    ratio, word = INTONATION[gold]
    low, high, stretch = sounds.SPEAKERS[rng.choice(list(sounds.SPEAKERS))]
    pitch, count = rng.uniform(low, high), rng.randint(2, 3)
    letters = [rng.choice(list(sounds.VOWELS)) for _ in range(count)]
    ends = [pitch] * (count - 1) + [pitch * ratio ** rng.uniform(0.9, 1.1)]
    lengths = [rng.uniform(0.2, 0.28) for _ in range(count - 1)] + [rng.uniform(0.35, 0.5)]
    parts = [sounds.syllable(letter, sounds.gliding(pitch, end, length), stretch)
             for letter, end, length in zip(letters, ends, lengths, strict=True)]  # fmt: skip
    return Heard(
        sounds.sequence(parts, [0.06] * (count - 1)),
        ("Is it a question or a statement?", "What does the intonation of the speaker suggest?"),
        gold, tuple(INTONATION), "the voice", ("flat",) * (count - 1) + (word,), "medium",
    )  # fmt: skip


def speaker_order(rng: Random) -> Heard:
    everyone = [*sounds.SPEAKERS, "Robot"]
    names = rng.sample(everyone, rng.randint(1, 3))
    is_last = len(names) > 1 and rng.random() < 0.5
    if len(names) == 1:
        asked = ("Who is speaking?", "Identify the source of the speaking voice.")
    elif is_last:
        asked = ("Who speaks last?", "Whose voice comes at the end?")
    else:
        asked = ("Who speaks first?", "Whose voice comes at the beginning?")
    parts = [sounds.spoken(rng, name, rng.choice(list(sounds.VOWELS)), rng.uniform(0.3, 0.45)) for name in names]
    return Heard(
        sounds.sequence(parts, [rng.uniform(0.08, 0.15) for _ in parts[1:]]), asked,
        names[-1 if is_last else 0], tuple(everyone), "the talk", tuple(SPEAKER_SOUND[name] for name in names),
        "easy" if len(names) == 1 else "medium",
    )  # fmt: skip


def speaker_count(rng: Random) -> Heard:
    count = rng.randint(1, 3)
    names = rng.sample([*sounds.SPEAKERS, "Robot"], count)
    turns = names + [rng.choice(names) for _ in range(rng.randint(0, 4 - count))]
    rng.shuffle(turns)
    parts = [sounds.spoken(rng, name, rng.choice(list(sounds.VOWELS)), rng.uniform(0.26, 0.36)) for name in turns]
    return Heard(
        sounds.sequence(parts, [rng.uniform(0.08, 0.12) for _ in parts[1:]]),
        ("How many different speakers are there?", "How many people can be heard?"),
        NUMBERS[count], NUMBERS[1:5], "the talk", tuple(SPEAKER_SOUND[name] for name in turns), "hard",
    )  # fmt: skip


EMOTIONS = {"Calm": ("slow", "even"), "Excited": ("quick", "rising"), "Sad": ("slow", "sinking"),
            "Angry": ("quick", "harsh")}  # fmt: skip


def emotion(rng: Random) -> Heard:
    gold = rng.choice(list(EMOTIONS))
    low, high, stretch = sounds.SPEAKERS[rng.choice(list(sounds.SPEAKERS))]
    pitch = rng.uniform(low, high)
    start, end = {"Calm": (1.0, 1.0), "Excited": (1.0, 1.6), "Sad": (1.0, 0.72), "Angry": (1.1, 1.0)}[gold]
    is_quick = EMOTIONS[gold][0] == "quick"
    seconds = rng.uniform(0.13, 0.17) if is_quick else rng.uniform(0.38, 0.5)
    count = rng.randint(4, 5) if is_quick else rng.randint(2, 3)
    parts = [
        sounds.syllable(rng.choice(list(sounds.VOWELS)), sounds.gliding(pitch * start, pitch * end, seconds), stretch,
                        tilt=-0.3 if gold == "Angry" else 0.5)
        for _ in range(count)
    ]  # fmt: skip
    wave = sounds.sequence(parts, [0.05 if is_quick else 0.1] * (count - 1))
    if gold == "Angry":
        wave = np.clip(wave * 4.0, -1.0, 1.0)
    return Heard(
        wave, ("Which emotion does the speaker show?", "How does the speaker feel?"), gold, tuple(EMOTIONS),
        "the voice", EMOTIONS[gold], "hard",
    )  # fmt: skip


_REASON, _EXTRACT = "Reasoning", "Information Extraction"
KINDS = (
    Kind("music", _EXTRACT, "Melodic Structure Interpretation", contour),
    Kind("music", _EXTRACT, "Melodic Structure Interpretation", higher_note),
    Kind("music", _REASON, "Temporal Reasoning", highest_note),
    Kind("music", _REASON, "Temporal Reasoning", note_count),
    Kind("music", _EXTRACT, "Rhythm and Tempo Understanding", tempo),
    Kind("music", _EXTRACT, "Harmony and Chord Progressions", chord),
    Kind("music", _EXTRACT, "Musical Texture Interpretation", texture),
    Kind("music", _EXTRACT, "Instrumentation", instrument),
    Kind("sound", _EXTRACT, "Sound-Based Event Recognition", event),
    Kind("sound", _REASON, "Temporal Event Reasoning", event_order),
    Kind("sound", _REASON, "Event-Based Sound Reasoning", event_missing),
    Kind("sound", _REASON, "Event-Based Sound Reasoning", event_twice),
    Kind("sound", _REASON, "Temporal Event Reasoning", event_count),
    Kind("sound", _REASON, "Acoustic Scene Reasoning", loudness),
    Kind("sound", _REASON, "Ambient Sound Interpretation", background),
    Kind("speech", _EXTRACT, "Phonological Sequence Decoding", vowel),
    Kind("speech", _EXTRACT, "Phonological Sequence Decoding", vowel_sequence),
    Kind("speech", _REASON, "Phonemic Stress Pattern Analysis", stress),
    Kind("speech", _REASON, "Counting", syllable_count),
    Kind("speech", _REASON, "Emotion Flip Detection", intonation),
    Kind("speech", _REASON, "Multi Speaker Role Mapping", speaker_order),
    Kind("speech", _REASON, "Multi Speaker Role Mapping", speaker_count),
    Kind("speech", _REASON, "Emotion State summarisation", emotion),
)
TASKS = ("music", "sound", "speech")
_BY_TASK = {task: [kind for kind in KINDS if kind.task == task] for task in TASKS}


# ---- wording


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def worded(rng: Random, heard: Heard) -> str:
    """The taught answer: perhaps an opening, what is heard, perhaps a remark, the choice."""
    listed = ", ".join(heard.heard)
    body = rng.choice(FORMS).format(
        subject=heard.subject, heard=listed, verb=rng.choice(VERBS), is_what=rng.choice(IS_WHAT)
    )
    lines = [rng.choice(OPENINGS)] if rng.random() < 0.4 else []
    lines.append(capitalized(f"{rng.choice(STARTERS)}{body}."))
    if rng.random() < 0.4:
        lines.append(rng.choice(REMARKS))
    return "\n".join([*lines, f"{ANSWER_MARK} {heard.gold}"])


def word_tokens(text: str) -> set[str]:
    """What MMAU's scorer compares."""
    return set(re.findall(r"\b\w+\b", text.lower()))


def is_matched(answer: str, gold: str, choices: Sequence[str]) -> bool:
    """MMAU's own rule: all tokens of the right choice, and none of another's."""
    said, right = word_tokens(answer), word_tokens(gold)
    wrong = set().union(*(word_tokens(choice) for choice in choices if choice != gold)) - right
    return right <= said and not wrong & said


def make_item(seed: int, index: int) -> Item:
    """Item number `index` of the stream `seed`; tasks take turns."""
    rng = Random(f"listening/{seed}/{index}")
    task = TASKS[index % len(TASKS)]
    kind = rng.choice(_BY_TASK[task])
    heard = kind.make(rng)
    choices = [heard.gold, *(choice for choice in heard.others if choice != heard.gold)]
    choices = choices[:1] + rng.sample(choices[1:], min(3, len(choices) - 1))
    rng.shuffle(choices)
    answer = worded(rng, heard)
    assert is_matched(answer, heard.gold, choices), (answer, choices)
    row: dict[str, object] = {
        "question": rng.choice(heard.questions), "choices": choices, "answer": heard.gold, "dataset": DATASET,
        "task": task, "split": "test", "category": kind.category, "sub-category": kind.sub_category,
        "difficulty": heard.difficulty,
    }  # fmt: skip
    return Item(row, sounds.as_clip(rng, heard.wave), answer)


def make_items(seed: int, count: int, start: int = 0) -> Iterator[Item]:
    """Items `start .. start + count` of the stream `seed`."""
    return (make_item(seed, index) for index in range(start, start + count))


# ---- how a question is put

# Those of eval=mmau first.
PROMPTS = (
    "{question}  Select one option from the provided choices.\n{choices}.",
    "{question} Please choose the answer from the following options: {choices}.",
    "{question}\n{lettered_choices}\nAnswer with one of the choices.",
    "{question}\n{lettered_choices}",
)


def prompt(row: dict[str, object], form: str) -> str:
    """The text of the user's turn, in one of `PROMPTS`."""
    choices: list[str] = row["choices"]  # type: ignore[assignment]
    lettered = "\n".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=False))
    return form.format(question=row["question"], choices=choices, lettered_choices=lettered)


# ---- packaged rows


def held_out_items(count: int = NUM_HELD_OUT_ITEMS) -> list[Item]:
    return list(make_items(HELD_OUT_SEED, count))


def write_packaged(folder: Path, items: Sequence[Item]) -> None:
    """questions.json, and a flac file of 8-bit samples for each clip."""
    import soundfile

    (folder / "audio").mkdir(parents=True, exist_ok=True)
    rows = []
    for index, item in enumerate(items):
        name = f"{DATASET}-{index:04d}"
        rows.append({"id": name, "audio_id": f"./audio/{name}.flac", **item.row})
        samples = item.clip.astype(np.float64) / 128.0  # eight bits and flac: 4 kB a second
        path = folder / "audio" / f"{name}.flac"
        soundfile.write(path, samples, sounds.RATE, subtype="PCM_S8", format="FLAC", compression_level=1.0)
    lines = ",\n".join(json.dumps(row) for row in rows)
    (folder / "questions.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main() -> None:
    """Prints rows with their answers, or writes the packaged folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=TRAIN_SEED)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--write", type=Path, help="folder for questions.json and the clips, of held-out items")
    args = parser.parse_args()
    if args.write is not None:
        write_packaged(args.write, held_out_items())
        return
    for item in make_items(args.seed, args.count):
        print(json.dumps({**item.row, "seconds": round(item.clip.size / sounds.RATE, 2), "taught": item.answer}))


if __name__ == "__main__":
    main()
