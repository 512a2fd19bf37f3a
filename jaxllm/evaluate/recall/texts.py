"""Texts with one fact in them: an opening, fillers with the fact among them, and a question.

A text is a function of style, length, depth and seed, and of the tokenizer, which says how many
fillers fit.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from jaxllm.errors import CapacityError, ConfigError
from jaxllm.evaluate.recall import stories

Encode = Callable[[str], list[int]]
OTHERS = 0.25  # how often somebody else is met, where many are


@dataclasses.dataclass(frozen=True)
class Told:
    """A text in its parts. fillers: makes one more each time it is asked. answers: all that are
    offered, the right one first; each goes after the question as it is.
    """

    opening: str
    fact: str
    question: str
    answers: tuple[str, ...]
    filler: Callable[[], str]


@dataclasses.dataclass(frozen=True)
class Probe:
    """Token ids of a text up to its question, and of each answer; the right one has index `right`.

    Fewer than `length` tokens by less than a filler's.
    """

    tokens: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    right: int


def _passkey(rng: Random) -> Told:
    """The passkey test (Mohtashami and Jaggi 2023, arXiv 2305.16300, appendix A)."""
    keys = [str(key) for key in rng.sample(range(10_000, 100_000), 10)]
    fillers = (
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    )
    return Told(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize"
        " it. I will quiz you about the important information there.",
        f"The pass key is {keys[0]}. Remember it. {keys[0]} is the pass key.",
        " What is the pass key? The pass key is",
        tuple(f" {key}" for key in keys),
        lambda: fillers,
    )


def _story(rng: Random) -> Told:
    """A story as the demo models know them: who was the friend?"""
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

    return Told(
        stories.OPENING.format_map(bound),
        stories.FACT.format_map(bound),
        stories.QUESTION,
        tuple(f" {friend}" for friend in friends),
        partial(stories.filler, rng),
    )


def _meetings(rng: Random) -> Told:
    """Many are met: which name had the one of that kind? For models of scripts/train_long.py.

    The others are told among the fillers, each of another kind and name, every fourth sentence or
    so until there is no other kind.
    """
    kinds = rng.sample(stories.KINDS, len(stories.KINDS))
    names = rng.sample(stories.FRIENDS, len(stories.FRIENDS))
    fact, *others = (
        stories.MET.format(kind=kind, name=name) for kind, name in zip(kinds, names, strict=False)
    )

    def filler() -> str:
        return others.pop() if others and rng.random() < OTHERS else stories.filler(rng)

    return Told(
        stories.filler(rng),
        fact,
        stories.ASKED.format(kind=kinds[0]),
        tuple(f" {name}" for name in names),
        filler,
    )


STYLES: dict[str, Callable[[Random], Told]] = {
    "passkey": _passkey,
    "story": _story,
    "meetings": _meetings,
}


def probe(encode: Encode, style: str, *, length: int, depth: float, seed: int) -> Probe:
    """A text of at most `length` tokens, the fact after the share `depth` of its fillers.

    encode: a text as the model reads it, begin-of-text and all. The same arguments give the same
    text, and texts of one seed differ between depths in the fact's place alone.

    Raises ConfigError for an unknown style or a depth outside 0 to 1, CapacityError for a length
    that the fact and its question do not fit into.
    """
    if style not in STYLES:
        raise ConfigError(f"texts must be one of {', '.join(STYLES)}, got {style!r:.40}")
    if not 0 <= depth <= 1:
        raise ConfigError(f"a depth must be from 0 (begin) to 1 (end), got {depth}")
    told = STYLES[style](Random(f"{style} {seed}"))
    fillers: list[str] = []
    used = shortest = len(encode(_text(told, fillers, depth)))
    if shortest > length:
        raise CapacityError(
            f"a {style} text needs {shortest} tokens without any filler; ask for a length above"
            f" {length}"
        )
    while used <= length:  # an estimate, from each filler by itself
        fillers.append(told.filler())
        used += max(1, len(encode(f"{told.opening} {fillers[-1]}")) - len(encode(told.opening)))
    while len(encode(_text(told, fillers, depth))) > length:
        fillers.pop()
    text = _text(told, fillers, depth)
    each = [encode(text + answer) for answer in told.answers]
    cut = _shared([encode(text), *each])
    order = sorted(range(len(each)), key=lambda i: told.answers[i])
    return Probe(tuple(each[0][:cut]), tuple(tuple(each[i][cut:]) for i in order), order.index(0))


def _text(told: Told, fillers: Sequence[str], depth: float) -> str:
    at = round(depth * len(fillers))
    return " ".join([told.opening, *fillers[:at], told.fact, *fillers[at:]]) + told.question


def _shared(each: Sequence[Sequence[int]]) -> int:
    """How many tokens all begin with; at least one is left of each but the first."""
    cut = min(len(each[0]), *(len(ids) - 1 for ids in each[1:]))
    while any(ids[:cut] != each[0][:cut] for ids in each):
        cut -= 1
    return cut
