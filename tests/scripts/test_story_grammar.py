"""The story corpus is varied, grammatical and consistent."""

import re
from collections.abc import Iterable
from random import Random

import pytest

from scripts.demo_models import story_grammar
from scripts.demo_models.story.tables import NAMES

COUNT = 2000
# "a" or "an" depends on the sound: words of the tables whose first letter misleads.
SILENT_H = {"honest", "hour"}
PRONOUNS = {"she": ("she", "her", "herself"), "he": ("he", "him", "his", "himself")}


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return list(story_grammar.draw_stories(COUNT, 0))


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", text)


def sentences_of(shapes: Iterable[story_grammar.Shape]) -> list[str]:
    return [
        sentence
        for shape in shapes
        for part in shape
        for beat in part
        for sentence in beat
        if sentence
    ]


def test_stories_are_distinct(corpus: list[str]) -> None:
    """2000 stories have no duplicate."""
    assert len(set(corpus)) == COUNT


def test_stories_depend_on_seed_only(corpus: list[str]) -> None:
    """A seed gives the same stories for any count, and another seed gives different ones."""
    assert list(story_grammar.draw_stories(50, 0)) == corpus[:50]
    assert list(story_grammar.draw_stories(50, 1)) != corpus[:50]


def test_stories_have_80_to_200_words(corpus: list[str]) -> None:
    lengths = [len(story.split()) for story in corpus]
    assert min(lengths) >= 80
    assert max(lengths) <= 200


def test_stories_contain_no_grammar_markup(corpus: list[str]) -> None:
    assert not [story for story in corpus if re.search(r"[\[\]{}()|]|  ", story)]


def test_every_sentence_template_can_be_filled() -> None:
    """Every sentence of every shape expands to text with a capital at its start and an end mark."""
    rng = Random(0)
    for sentence in sentences_of(story_grammar.SHAPES):
        for _ in range(5):
            text = story_grammar.fill(sentence, story_grammar.draw_bindings(rng), rng)
            assert re.match(r'["A-Z]', text), text
            assert re.search(r'[.!?]"?$', text), text


def test_articles_fit_next_word(corpus: list[str]) -> None:
    for story in corpus:
        for article, word in re.findall(r"\b([Aa]n?) ([A-Za-z]+)", story):
            vowel = word[0].lower() in "aeiou" or word in SILENT_H
            assert (article.lower() == "an") == vowel, f"{article} {word}"


def test_quotes_open_and_close_in_each_paragraph(corpus: list[str]) -> None:
    for story in corpus:
        for paragraph in story.split("\n\n"):
            parts = paragraph.split('"')
            assert len(parts) % 2 == 1, paragraph
            for before, spoken in zip(parts[0::2], parts[1::2], strict=False):
                goes_on = before.endswith(", ")  # "I found it," she said, "and it is mine."
                assert before == "" or before.endswith(" "), paragraph
                assert spoken[0].isupper() or goes_on, paragraph
                assert spoken[-1] in ".,!?", paragraph


def test_pronoun_follows_its_single_antecedent(corpus: list[str]) -> None:
    """A pronoun's gender has one name in a story, which appears before the first pronoun."""
    for story in corpus:
        seen = [
            word.lower() if word not in sum(NAMES.values(), ()) else word for word in words(story)
        ]
        for gender, forms in PRONOUNS.items():
            named = [i for i, word in enumerate(seen) if word in NAMES[gender]]
            meant = [i for i, word in enumerate(seen) if word in forms]
            assert len({seen[i] for i in named}) <= 1, story
            if meant:
                assert named, story
                assert named[0] < meant[0], story


def test_unknown_placeholder_is_refused_by_name() -> None:
    rng = Random(0)
    with pytest.raises(KeyError, match="dragon"):
        story_grammar.fill("A {Dragon}.", story_grammar.draw_bindings(rng), rng)
