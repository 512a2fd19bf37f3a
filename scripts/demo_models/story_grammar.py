"""Tells short stories from a small grammar of its own: the corpus of the demo models.

A story is a shape (story/found.py and its neighbours) filled in from story/tables.py. One decision:
what a story is about is drawn first and bound to names, and only then are sentences chosen, so
characters, things and pronouns stay the same from the first sentence to the last.

In a sentence `{name}` is a bound word, `{Name}` the same with a capital, `[a|b]` one of several
spellings, and `a(n)` the article that fits the next word.

    python scripts/demo_models/story_grammar.py --count 3 --seed 7
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models.story.beats import OPENING, Paragraph, Shape
from scripts.demo_models.story.brave import BRAVE
from scripts.demo_models.story.found import FOUND
from scripts.demo_models.story.made import MADE
from scripts.demo_models.story.tables import (
    ANIMALS,
    CHILD,
    COLUMNS,
    FRIEND_TRAITS,
    NAMES,
    PRONOUNS,
    SINGLES,
    TRAITS,
    Row,
)
from scripts.demo_models.story.together import TOGETHER

SHAPES: tuple[Shape, ...] = FOUND + MADE + TOGETHER + BRAVE
CHILD_SHARE = 0.4
LENGTHS = (80, 200)  # words

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa])\(n\) (?=(\w+))")
_VOWEL_SOUND = re.compile(r"[aeiou]|honest")


class Bindings(dict[str, str]):
    """What each placeholder stands for; a name with a capital letter is its value with one."""

    def __missing__(self, name: str) -> str:
        lower = name[0].lower() + name[1:]
        if lower == name:
            raise KeyError(f"the story tables have no word called {name!r}")
        value = self[lower]
        return value[0].upper() + value[1:]


def draw_character(rng: Random, pronoun: str, kinds: Row, traits: Row) -> dict[str, str]:
    """Draws somebody with that pronoun: a child, or an animal of one of `kinds`."""
    child = rng.random() < CHILD_SHARE
    he, him, his, himself = PRONOUNS[pronoun]
    return {
        "name": rng.choice(NAMES[pronoun]),
        "kind": CHILD[pronoun] if child else rng.choice(kinds),
        "trait": rng.choice(traits),
        "he": he,
        "him": him,
        "his": his,
        "himself": himself,
        "hands": "hands" if child else "paws",
    }


def draw_cast(rng: Random) -> dict[str, str]:
    """Draws a hero (`he`, `kind`, ...) and a friend (`phe`, `pkind`, ...) who differ in both."""
    pronoun, other = rng.choice((("she", "he"), ("he", "she")))
    hero = draw_character(rng, pronoun, ANIMALS, TRAITS)
    kinds = tuple(kind for kind in ANIMALS if kind != hero["kind"])
    friend = draw_character(rng, other, kinds, FRIEND_TRAITS)
    cast = {key: value for key, value in hero.items() if key != "name"}
    cast |= {f"p{key}": value for key, value in friend.items() if key != "name"}
    return cast | {"hero": hero["name"], "pal": friend["name"]}


def draw_bindings(rng: Random) -> Bindings:
    """Draws everything that a story may mention: its cast, and one row of every table."""
    bindings = Bindings(draw_cast(rng))
    for name, words in SINGLES.items():
        bindings[name] = rng.choice(words)
    for names, rows in COLUMNS.items():
        bindings.update(zip(names, rng.choice(rows), strict=True))
    return bindings


def fill(sentence: str, bindings: Bindings, rng: Random) -> str:
    """Chooses among alternatives and puts in bound words, until nothing is left to put in."""
    while "[" in sentence or "{" in sentence:
        sentence = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), sentence)
        sentence = sentence.format_map(bindings)
    return _ARTICLE.sub(lambda m: f"{m[1]}n " if _VOWEL_SOUND.match(m[2]) else f"{m[1]} ", sentence)


def tell_paragraph(paragraph: Paragraph, bindings: Bindings, rng: Random) -> str:
    """Tells one sentence of every beat."""
    sentences = (fill(rng.choice(beat), bindings, rng) for beat in paragraph)
    return " ".join(sentence for sentence in sentences if sentence)


def tell(rng: Random) -> str:
    """Tells one story of 80 to 200 words: plain English paragraphs with a blank line between."""
    shortest, longest = LENGTHS
    while True:
        shape, bindings = rng.choice(SHAPES), draw_bindings(rng)
        story = "\n\n".join(tell_paragraph(paragraph, bindings, rng) for paragraph in shape)
        if shortest <= len(story.split()) <= longest:
            return story


def beats() -> list[str]:
    """Every sentence, or few that belong together, of every shape, in order of the alphabet."""
    found = {beat for shape in SHAPES for paragraph in shape for of in paragraph for beat in of}
    return sorted(found - {""})


def glimpse(rng: Random) -> str:
    """Tells how a story opens, and one or two beats of any story that name its characters again.

    So short that what a name is copied from is never far away.
    """
    bindings, count = draw_bindings(rng), rng.choice((1, 2))
    told = [rng.choice(OPENING)]
    if rng.random() < 0.4:
        told += rng.sample(_OF_HERO, count)
    else:
        told += [rng.choice(_INTRODUCTIONS), *rng.sample(_NAMING, count)]
    text = fill(told[0], bindings, rng)
    for beat in told[1:]:
        text += rng.choice(("\n\n", " ", " ", " ", " ")) + fill(beat, bindings, rng)
    return text


def stories(count: int, seed: int) -> Iterator[str]:
    """Tells `count` stories; the same seed tells the same stories in the same order."""
    rng = Random(seed)
    for _ in range(count):
        yield tell(rng)


# What a glimpse is made of: beats that bring the friend in, others that name somebody, and of these
# those that know of no friend.
_INTRODUCTIONS = tuple(beat for beat in beats() if "{pkind}" in beat)
_NAMING = tuple(
    beat
    for beat in beats()
    if beat not in (*OPENING, *_INTRODUCTIONS) and ("{hero}" in beat or "{pal}" in beat)
)
_OF_HERO = tuple(
    beat for beat in _NAMING if not re.search(r"{[Pp](al|he|him|his|himself|hands)}", beat)
)


def main() -> None:
    """Prints stories."""
    parser = argparse.ArgumentParser(
        description="Print stories from the demo models' grammar.",
        epilog="example: python scripts/demo_models/story_grammar.py --count 3 --seed 7",
    )
    parser.add_argument("--count", type=int, default=1, help="how many stories (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="which stories (default 0)")
    options = parser.parse_args()
    print("\n\n* * *\n\n".join(stories(options.count, options.seed)))


if __name__ == "__main__":
    main()
