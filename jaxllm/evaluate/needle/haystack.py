"""Haystack texts: an opening, fillers with one fact among them, and a question.

A text is a function of style, length, depth, seed and the tokenizer, which determines how many
fillers fit.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from jaxllm.errors import CapacityError, ConfigError
from jaxllm.evaluate.needle import stories

Encode = Callable[[str], list[int]]
MEETING_RATE = 0.25  # probability that a filler introduces another animal, in "meetings"


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
    friends = rng.sample(stories.FRIENDS, len(stories.FRIENDS))
    kind, pal_kind = rng.sample(stories.KINDS, 2)
    bound = {
        "hero": rng.choice(stories.HEROES),
        "kind": kind,
        "trait": rng.choice(stories.TRAITS),
        "home": rng.choice(stories.HOMES),
        "answer": friends[0],
        "pal_kind": pal_kind,
        "pal_trait": rng.choice(stories.PAL_TRAITS),
    }

    return HaystackText(
        stories.OPENING.format_map(bound),
        stories.FACT.format_map(bound),
        stories.QUESTION,
        tuple(f" {friend}" for friend in friends),
        partial(stories.filler, rng),
    )


def _make_meetings(rng: Random) -> HaystackText:
    """Return a text with many named animals; it asks for the name of one kind.

    For models of scripts/demo_models/train_long.py. About every fourth filler introduces another
    animal, of a new kind and name, until no kinds are left.
    """
    kinds = rng.sample(stories.KINDS, len(stories.KINDS))
    names = rng.sample(stories.FRIENDS, len(stories.FRIENDS))
    fact, *others = (
        stories.MEETING.format(kind=kind, name=name)
        for kind, name in zip(kinds, names, strict=False)
    )

    def filler() -> str:
        return others.pop() if others and rng.random() < MEETING_RATE else stories.filler(rng)

    return HaystackText(
        stories.filler(rng),
        fact,
        stories.MEETING_QUESTION.format(kind=kinds[0]),
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
