"""Character consistency: hand-written texts and stories of the grammar."""

import pytest

from scripts.demo_models.story_consistency import Judgment, judge, rate_stories
from scripts.demo_models.story_grammar import draw_stories

STORY = (
    "Once there was a curious little girl called Mia, who lived in an old mill beside a stream. "
    "She loved to follow ants. One day, Mia went to the park.\n\n"
    "There she met a shy fox named Ben. Mia looked at her feet. What should she say? "
    'Then her kite fell to the ground, and Ben picked it up. "What a lovely kite!" said Ben. '
    '"Is it yours?"\n\n'
    "Then Mia and Ben went home, and both of them were glad."
)


def test_consistent_story_has_no_slips() -> None:
    assert judge(STORY) == Judgment((), 8, 0)


def test_grammar_stories_match_beats_without_slips() -> None:
    """judge finds every sentence of 150 generated stories in a known beat, and no slip."""
    judgments = [judge(story) for story in draw_stories(150, 11)]
    assert [j.errors for j in judgments] == [()] * 150
    assert sum(j.others for j in judgments) == 0


@pytest.mark.parametrize(
    ("right", "wrong", "slip"),
    [
        ("Then Mia and Ben", "Then Mia and Tom", "Tom is a third name"),
        ("named Ben. Mia", "named Ben. Nora", "Nora is a third name"),
        ("said Ben", "said Bennora", "Bennora is an unknown word"),
        ("shy fox", "shy girl named Nora, a bear and a fox", "fox is a third kind"),
        ("She loved", "He loved", "wrong pronoun (Mia, Ben): He loved to follow ants."),
        ("her feet", "his feet", "wrong pronoun (Mia, Ben): Mia looked at his feet. What should"),
        ("There she met", "There he met", "wrong pronoun (Mia, Ben): There he met a shy fox named"),
        ("Then her kite", "Then his kite", "wrong pronoun (Mia, Ben): Then his kite fell"),
    ],
)
def test_slips_are_named(right: str, wrong: str, slip: str) -> None:
    assert right in STORY
    errors = judge(STORY.replace(right, wrong)).errors
    assert any(error.startswith(slip) for error in errors), errors


def test_friend_must_differ_from_hero_in_pronoun() -> None:
    assert "Mia and Nora have the same pronoun: she" in judge(STORY.replace("Ben", "Nora")).errors


def test_characters_may_swap_roles_with_matching_pronouns() -> None:
    """Hero and friend may swap roles in a beat if the pronouns swap with them."""
    assert judge(STORY + ' "Thank you!" cried Ben, and he hugged Mia.').errors == ()
    assert judge(STORY + ' "Thank you!" cried Ben, and she hugged Mia.').errors
    assert judge(STORY + ' "Do not worry," he said. "I am good at finding."').errors == ()
    assert judge(STORY + ' "Do not worry," she said. "I am good at finding."').errors


def test_unknown_sentences_are_judged_by_names_only() -> None:
    assert judge(STORY + " Ben ate the moon.") == Judgment((), 8, 1)
    assert judge(STORY + " Max ate the moon.").errors == ("Max is a third name",)


def test_rate_counts_unfinished_or_nameless_story_as_inconsistent() -> None:
    """A missing story and one without characters count as inconsistent."""
    share, judgments = rate_stories([STORY, None, "It rained."])
    assert share == pytest.approx(1 / 3)
    assert [bool(j.errors) for j in judgments] == [False, True, True]
