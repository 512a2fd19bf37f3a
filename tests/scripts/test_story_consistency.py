"""Character consistency: hand-written texts and stories of the grammar."""

import pytest

from scripts.demo_models.story_consistency import Judged, judge, rate
from scripts.demo_models.story_grammar import stories

STORY = (
    "Once there was a curious little girl called Mia, who lived in an old mill beside a stream. "
    "She loved to follow ants. One day, Mia went to the park.\n\n"
    "There she met a shy fox named Ben. Mia looked at her feet. What should she say? "
    'Then her kite fell to the ground, and Ben picked it up. "What a lovely kite!" said Ben. '
    '"Is it yours?"\n\n'
    "Then Mia and Ben went home, and both of them were glad."
)


def test_consistent_story_has_no_slips() -> None:
    assert judge(STORY) == Judged((), 8, 0)


def test_grammar_stories_match_beats_without_slips() -> None:
    """judge finds every sentence of 150 generated stories in a known beat, and no slip."""
    judged = [judge(story) for story in stories(150, 11)]
    assert [j.slips for j in judged] == [()] * 150
    assert sum(j.others for j in judged) == 0


@pytest.mark.parametrize(
    ("right", "wrong", "slip"),
    [
        ("Then Mia and Ben", "Then Mia and Tom", "Tom is a third name"),
        ("named Ben. Mia", "named Ben. Nora", "Nora is a third name"),
        ("said Ben", "said Bennora", "Bennora is nobody"),
        ("shy fox", "shy girl named Nora, a bear and a fox", "a fox is a third kind"),
        ("She loved", "He loved", "not of Mia and Ben: He loved to follow ants."),
        ("her feet", "his feet", "not of Mia and Ben: Mia looked at his feet. What should she"),
        ("There she met", "There he met", "not of Mia and Ben: There he met a shy fox named Ben."),
        ("Then her kite", "Then his kite", "not of Mia and Ben: Then his kite fell"),
    ],
)
def test_slips_are_named(right: str, wrong: str, slip: str) -> None:
    assert right in STORY
    found = judge(STORY.replace(right, wrong)).slips
    assert any(each.startswith(slip) for each in found), found


def test_friend_must_differ_from_hero_in_pronoun() -> None:
    assert "Nora is she as Mia is" in judge(STORY.replace("Ben", "Nora")).slips


def test_characters_may_swap_roles_with_matching_pronouns() -> None:
    """Hero and friend may swap roles in a beat if the pronouns swap with them."""
    assert judge(STORY + ' "Thank you!" cried Ben, and he hugged Mia.').slips == ()
    assert judge(STORY + ' "Thank you!" cried Ben, and she hugged Mia.').slips
    assert judge(STORY + ' "Do not worry," he said. "I am good at finding."').slips == ()
    assert judge(STORY + ' "Do not worry," she said. "I am good at finding."').slips


def test_unknown_sentences_are_judged_by_names_only() -> None:
    assert judge(STORY + " Ben ate the moon.") == Judged((), 8, 1)
    assert judge(STORY + " Max ate the moon.").slips == ("Max is a third name",)


def test_rate_counts_unfinished_or_nameless_story_as_inconsistent() -> None:
    """A missing story and one without characters count as inconsistent."""
    share, judged = rate([STORY, None, "It rained."])
    assert share == pytest.approx(1 / 3)
    assert [bool(j.slips) for j in judged] == [False, True, True]
