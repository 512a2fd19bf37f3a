"""Short stories from a small grammar: the training corpus of the demo models.

A story is a shape (story/mysteries.py and its neighbors) with words from story/tables.py. One
decision: the characters and things of a story are drawn first and bound to placeholders, and only
then are sentences chosen, so that characters, things and pronouns are consistent.

In a sentence `{name}` is a bound word, `{Name}` the same word capitalized, `[a|b]` a choice of
texts, and `a(n)` the article that fits the next word.

    python scripts/demo_models/story_grammar.py --count 3 --seed 7
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models.story.activities import ACTIVITIES
from scripts.demo_models.story.beats import OPENING, Paragraph, Shape
from scripts.demo_models.story.courage import COURAGE
from scripts.demo_models.story.friendship import FRIENDSHIP
from scripts.demo_models.story.mysteries import MYSTERIES
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

# The order of the shapes determines the stories of a seed.
SHAPES: tuple[Shape, ...] = MYSTERIES + ACTIVITIES + FRIENDSHIP + COURAGE
CHILD_SHARE = 0.4
LENGTHS = (80, 200)  # words

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa])\(n\) (?=(\w+))")
_VOWEL_SOUND = re.compile(r"[aeiou]|honest")


class Bindings(dict[str, str]):
    """The word for each placeholder; a capitalized placeholder has its capitalized word."""

    def __missing__(self, name: str) -> str:
        lower = name[0].lower() + name[1:]
        if lower == name:
            raise KeyError(f"unknown placeholder {name!r}: the story tables do not define it")
        value = self[lower]
        return value[0].upper() + value[1:]


def draw_character(rng: Random, pronoun: str, kinds: Row, traits: Row) -> dict[str, str]:
    """Draw a character with a pronoun: a child, or an animal of one of `kinds`."""
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
    """Draw a hero (`he`, `kind`, ...) and a friend (`phe`, ...) of another pronoun and kind."""
    pronoun, other = rng.choice((("she", "he"), ("he", "she")))
    hero = draw_character(rng, pronoun, ANIMALS, TRAITS)
    kinds = tuple(kind for kind in ANIMALS if kind != hero["kind"])
    friend = draw_character(rng, other, kinds, FRIEND_TRAITS)
    cast = {key: value for key, value in hero.items() if key != "name"}
    cast |= {f"p{key}": value for key, value in friend.items() if key != "name"}
    return cast | {"hero": hero["name"], "pal": friend["name"]}


def draw_bindings(rng: Random) -> Bindings:
    """Draw all words of a story: its cast, and one row of every table."""
    bindings = Bindings(draw_cast(rng))
    for name, words in SINGLES.items():
        bindings[name] = rng.choice(words)
    for names, rows in COLUMNS.items():
        bindings.update(zip(names, rng.choice(rows), strict=True))
    return bindings


def fill(sentence: str, bindings: Bindings, rng: Random) -> str:
    """Choose among alternatives and insert bound words, until no placeholder remains."""
    while "[" in sentence or "{" in sentence:
        sentence = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), sentence)
        sentence = sentence.format_map(bindings)
    return _ARTICLE.sub(lambda m: f"{m[1]}n " if _VOWEL_SOUND.match(m[2]) else f"{m[1]} ", sentence)


def draw_paragraph(paragraph: Paragraph, bindings: Bindings, rng: Random) -> str:
    """Draw one sentence of every beat."""
    sentences = (fill(rng.choice(beat), bindings, rng) for beat in paragraph)
    return " ".join(sentence for sentence in sentences if sentence)


def draw_story(rng: Random) -> str:
    """Draw a story of 80 to 200 words: paragraphs with a blank line between them."""
    shortest, longest = LENGTHS
    while True:
        shape, bindings = rng.choice(SHAPES), draw_bindings(rng)
        story = "\n\n".join(draw_paragraph(paragraph, bindings, rng) for paragraph in shape)
        if shortest <= len(story.split()) <= longest:
            return story


def list_sentences() -> list[str]:
    """Return every alternative of every beat, a sentence or a few, in alphabetical order."""
    sentences = {
        sentence
        for shape in SHAPES
        for paragraph in shape
        for beat in paragraph
        for sentence in beat
    }
    return sorted(sentences - {""})


def draw_glimpse(rng: Random) -> str:
    """Draw a story's opening, and one or two sentences of any story that repeat a name.

    A glimpse is short, so that a name is copied over a short distance.
    """
    bindings, count = draw_bindings(rng), rng.choice((1, 2))
    sentences = [rng.choice(OPENING)]
    if rng.random() < 0.4:
        sentences += rng.sample(_HERO_ONLY, count)
    else:
        sentences += [rng.choice(_INTRODUCTIONS), *rng.sample(_NAMING, count)]
    text = fill(sentences[0], bindings, rng)
    for sentence in sentences[1:]:
        text += rng.choice(("\n\n", " ", " ", " ", " ")) + fill(sentence, bindings, rng)
    return text


def draw_stories(count: int, seed: int) -> Iterator[str]:
    """Yield `count` stories; a seed always gives the same stories in the same order."""
    rng = Random(seed)
    for _ in range(count):
        yield draw_story(rng)


# Sentences for glimpses: those that introduce the friend, others that name a character, and of the
# latter those without the friend.
_INTRODUCTIONS = tuple(sentence for sentence in list_sentences() if "{pkind}" in sentence)
_NAMING = tuple(
    sentence
    for sentence in list_sentences()
    if sentence not in (*OPENING, *_INTRODUCTIONS) and ("{hero}" in sentence or "{pal}" in sentence)
)
_HERO_ONLY = tuple(
    sentence
    for sentence in _NAMING
    if not re.search(r"{[Pp](al|he|him|his|himself|hands)}", sentence)
)


def main() -> None:
    """Print stories."""
    parser = argparse.ArgumentParser(
        description="Print stories from the demo models' grammar.",
        epilog="example: python scripts/demo_models/story_grammar.py --count 3 --seed 7",
    )
    parser.add_argument("--count", type=int, default=1, help="number of stories (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    options = parser.parse_args()
    print("\n\n* * *\n\n".join(draw_stories(options.count, options.seed)))


if __name__ == "__main__":
    main()
