"""Haystack texts: an opening, fillers with one fact among them, and a question.

A text is a function of style, length, depth, seed and the tokenizer, which determines how many
fillers fit.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from jaxllm.errors import CapacityError, ConfigError

Encode = Callable[[str], list[int]]
MEETING_RATE = 0.25  # probability that a filler introduces another animal, in "meetings"

# Words of the demo models' training grammar (scripts/demo_models/story_grammar.py). These models
# learned to copy names, so the fact is a friend's name, introduced once and asked for at the end.
# The hero is a girl and the friend a boy, since in the grammar the two always differ. Fillers have
# no names, except in texts with several facts (`MEETING`).
FRIENDS = (
    "Ben", "Tom", "Max", "Leo", "Sam", "Finn", "Otto", "Jack", "Theo", "Milo", "Hugo", "Oscar",
    "Felix", "Toby", "Jonah", "Arlo", "Rufus", "Gus", "Emil", "Noah", "Kofi", "Ravi", "Omar",
    "Diego",
)  # fmt: skip
HEROES = ("Mia", "Lily", "Zoe", "Nora", "Ruby", "Clara", "Ivy", "Rosa", "Luna", "Hazel", "Anna")
KINDS = ("fox", "rabbit", "bear", "mouse", "hedgehog", "squirrel", "badger", "kitten", "panda")
TRAITS = ("curious", "cheerful", "quiet", "brave", "clever", "gentle", "busy", "playful", "merry")
PAL_TRAITS = ("friendly", "patient", "funny", "thoughtful", "helpful", "jolly", "wise", "polite")
HOMES = (
    "in a small cottage by the river", "in a round house on a green hill",
    "at the edge of a sleepy village", "in a blue house near the sea",
    "on a small farm between two hills", "in a wooden house beside a lake",
)  # fmt: skip
HABITS = (
    "hum old songs", "collect round stones", "watch the boats go by", "ask questions",
    "draw pictures in the mud", "jump over puddles", "tell long jokes", "look at the stars",
    "build towers out of sticks", "make up silly songs", "count the clouds", "run down the hill",
)  # fmt: skip
MOODS = (
    "the leaves whispered", "the waves rolled in", "it smelled of plums", "the flowers nodded",
    "the apples shone", "the bees hummed", "the gulls cried", "the grass was tall",
    "the water was still", "it was very quiet", "the sand was warm", "the clock ticked",
)  # fmt: skip
PLACES = ("the park", "the forest", "the beach", "the market", "the meadow", "the orchard")

OPENING = "Once upon a time there was a {trait} {kind} named {hero} who lived {home}."
FACT = "Her best friend was {answer}, a {pal_trait} {pal_kind} from across the road."
FILLERS = (
    "She loved to {habit}.",
    "In summer she liked to {habit}, and in winter she liked to sleep.",
    "When there was nothing to do, she liked to {habit}.",
    "It was a fine day, and {mood}.",
    "It was a bright day, and {mood}.",
    "Everything was peaceful, and {mood}.",
    "One morning, she walked all the way to {place}.",
    "One quiet Sunday, she decided to spend some hours at {place}.",
    "The sun was shining.",
    "A light breeze was blowing.",
    "Somewhere a bird was singing.",
    "The sky was clear and blue.",
)
QUESTION = '\n\n"Thank you,'

# Texts with several facts: each kind of animal is met once and has its own name.
MEETING = "By the road stood the {kind} {name}."
MEETING_QUESTION = " Who came back? It was the {kind}"


def random_filler(rng: Random) -> str:
    """Return a random sentence that names nobody."""
    return rng.choice(FILLERS).format(
        habit=rng.choice(HABITS), mood=rng.choice(MOODS), place=rng.choice(PLACES)
    )


@dataclasses.dataclass(frozen=True)
class HaystackText:
    """The parts of a text.

    answers: all choices, the right one first; each is appended to the question unchanged. filler:
    returns a new filler at each call.
    """

    opening: str
    fact: str
    question: str
    answers: tuple[str, ...]
    filler: Callable[[], str]


@dataclasses.dataclass(frozen=True)
class Probe:
    """Token ids of a text with its question, and of each answer; `right` is the right one's index.

    The text is at most one filler shorter than the requested length.
    """

    tokens: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    right: int


def _make_passkey(rng: Random) -> HaystackText:
    """Return a passkey text (Mohtashami and Jaggi 2023, arXiv 2305.16300, appendix A)."""
    keys = [str(key) for key in rng.sample(range(10_000, 100_000), 10)]
    fillers = (
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    )
    return HaystackText(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize"
        " it. I will quiz you about the important information there.",
        f"The pass key is {keys[0]}. Remember it. {keys[0]} is the pass key.",
        " What is the pass key? The pass key is",
        tuple(f" {key}" for key in keys),
        lambda: fillers,
    )


def _make_story(rng: Random) -> HaystackText:
    """Return a story as in the demo models' training data; it asks for the friend's name."""
    friends = rng.sample(FRIENDS, len(FRIENDS))
    kind, pal_kind = rng.sample(KINDS, 2)
    bound = {
        "hero": rng.choice(HEROES),
        "kind": kind,
        "trait": rng.choice(TRAITS),
        "home": rng.choice(HOMES),
        "answer": friends[0],
        "pal_kind": pal_kind,
        "pal_trait": rng.choice(PAL_TRAITS),
    }

    return HaystackText(
        OPENING.format_map(bound),
        FACT.format_map(bound),
        QUESTION,
        tuple(f" {friend}" for friend in friends),
        partial(random_filler, rng),
    )


def _make_meetings(rng: Random) -> HaystackText:
    """Return a text with many named animals; it asks for the name of one kind.

    For models of scripts/demo_models/train_long.py. About every fourth filler introduces another
    animal, of a new kind and name, until no kinds are left.
    """
    kinds = rng.sample(KINDS, len(KINDS))
    names = rng.sample(FRIENDS, len(FRIENDS))
    fact, *others = (
        MEETING.format(kind=kind, name=name) for kind, name in zip(kinds, names, strict=False)
    )

    def filler() -> str:
        return others.pop() if others and rng.random() < MEETING_RATE else random_filler(rng)

    return HaystackText(
        random_filler(rng),
        fact,
        MEETING_QUESTION.format(kind=kinds[0]),
        tuple(f" {name}" for name in names),
        filler,
    )


STYLES: dict[str, Callable[[Random], HaystackText]] = {
    "passkey": _make_passkey,
    "story": _make_story,
    "meetings": _make_meetings,
}


def make_probe(encode: Encode, style: str, *, length: int, depth: float, seed: int) -> Probe:
    """Return a text of at most `length` tokens, the fact after the share `depth` of its fillers.

    Deterministic; texts with one seed differ between depths only in the place of the fact.

    Args:
        encode: Returns a text's token ids, including begin-of-text.
        style: A name in `STYLES`.

    Raises:
        ConfigError: For an unknown style, or a depth outside 0 to 1.
        CapacityError: If the fact and the question do not fit into `length`.
    """
    if style not in STYLES:
        raise ConfigError(f"text style must be one of {', '.join(STYLES)}: got {style!r:.40}")
    if not 0 <= depth <= 1:
        raise ConfigError(f"depth must be from 0 (start) to 1 (end): got {depth}")
    haystack = STYLES[style](Random(f"{style} {seed}"))
    fillers: list[str] = []
    used = shortest = len(encode(_render_text(haystack, fillers, depth)))
    if shortest > length:
        raise CapacityError(
            f"length is too short: got {length}, a {style} text without fillers has {shortest}"
            " tokens"
        )
    while used <= length:  # an estimate: each filler is encoded separately
        fillers.append(haystack.filler())
        opening = haystack.opening
        used += max(1, len(encode(f"{opening} {fillers[-1]}")) - len(encode(opening)))
    while len(encode(_render_text(haystack, fillers, depth))) > length:
        fillers.pop()
    text = _render_text(haystack, fillers, depth)
    each = [encode(text + answer) for answer in haystack.answers]
    cut = _common_prefix_length([encode(text), *each])
    order = sorted(range(len(each)), key=lambda i: haystack.answers[i])
    return Probe(tuple(each[0][:cut]), tuple(tuple(each[i][cut:]) for i in order), order.index(0))


def _render_text(haystack: HaystackText, fillers: Sequence[str], depth: float) -> str:
    at = round(depth * len(fillers))
    return (
        " ".join([haystack.opening, *fillers[:at], haystack.fact, *fillers[at:]])
        + haystack.question
    )


def _common_prefix_length(sequences: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix, leaving at least one token of all but the first."""
    cut = min(len(sequences[0]), *(len(ids) - 1 for ids in sequences[1:]))
    while any(ids[:cut] != sequences[0][:cut] for ids in sequences):
        cut -= 1
    return cut
