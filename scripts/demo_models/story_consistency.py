"""Does a model keep its characters? The share of stories told without a slip in name or pronoun.

A story is judged by its text alone. Its hero is the first character that it names, the friend the
second; they differ in pronoun, as the grammar's always do. A slip is

* the name of a third character, or an animal that neither of the two was introduced as,
* a friend whose pronoun is the hero's,
* a word that the grammar does not know, with a capital letter,
* a beat of the grammar told with a wrong pronoun. In a beat that names nobody every pronoun must be
  that of the character whom the grammar means there ("{He} loved to {habit}." is the hero); where
  a beat names somebody, its pronouns must be those of whom it names.

Sentences that are no beat of the grammar are judged by the first three rules; `Judged.beats` says
how many were. A story that does not end within the model's context is none without a slip.

    python scripts/demo_models/story_consistency.py jaxllm/demo/llama jaxllm/demo/gpt2
"""

import argparse
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jaxllm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
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
from scripts.demo_models.story_grammar import beats, stories

SEED = 1_000_003  # of the stories that are continued: no model was trained on them
PRONOUN_OF = {name: pronoun for pronoun, names in NAMES.items() for name in names}
# What a placeholder of a character can be: a name, or a form of the pronoun.
_BOTH = zip(*PRONOUNS.values(), strict=True)  # each form, of she and of he
FORMS = dict(zip(("he", "him", "his", "himself"), _BOTH, strict=True))
ROLES: dict[str, Row] = {
    "hero": tuple(PRONOUN_OF),
    "pal": tuple(PRONOUN_OF),
    **{f"{who}{form}": words for who in ("", "p") for form, words in FORMS.items()},
}
PAL_FORMS = {f"p{form}" for form in FORMS}
KINDS = (*ANIMALS, *CHILD.values())
WORDS: dict[str, Sequence[str]] = {
    "kind": KINDS,
    "pkind": KINDS,
    "trait": TRAITS,
    "ptrait": FRIEND_TRAITS,
    "hands": ("hands", "paws"),
    "phands": ("hands", "paws"),
    **SINGLES,
    **{
        name: tuple(dict.fromkeys(row[column] for row in rows))
        for names, rows in COLUMNS.items()
        for column, name in enumerate(names)
    },
}
_PARTS = re.compile(r"(\[[^\[\]]*\]|{\w+}|[Aa]\(n\) )")
_SENTENCE_END = re.compile(r'[.!?]"?(?: |$)')


class Judged(NamedTuple):
    """slips: what is wrong, in words; none in a story that keeps its characters. beats: sentences
    of the grammar that were found, others: sentences that are none."""

    slips: tuple[str, ...]
    beats: int
    others: int


class Pattern(NamedTuple):
    """A beat as an expression; roles: the placeholder that each of its groups stands for."""

    expression: re.Pattern[str]
    roles: tuple[str, ...]


def _expression(text: str, roles: list[str]) -> str:
    """The expression of all that a sentence with placeholders can become."""
    pieces = []
    for part in _PARTS.split(text):
        if part.startswith("["):
            options = [_expression(option, roles) for option in part[1:-1].split("|")]
            pieces.append(f"(?:{'|'.join(options)})")
        elif part.startswith("{"):
            name = part[1].lower() + part[2:-1]
            if name in ROLES:
                roles.append(name)
                pieces.append(rf"\b({'|'.join(ROLES[name])})\b")
            else:
                cells = [_expression(cell, roles) for cell in WORDS[name]]
                pieces.append(f"(?:{'|'.join(cells)})")
        else:
            pieces.append("an? " if part.lower() == "a(n) " else re.escape(part))
    return "".join(pieces)


@cache
def patterns() -> tuple[Pattern, ...]:
    """Every beat of every shape."""
    found = []
    for beat in beats():
        roles: list[str] = []
        expression = _expression(beat, roles) + r"(?= |$)"
        found.append(Pattern(re.compile(expression, re.IGNORECASE), tuple(roles)))
    return tuple(found)


@cache
def vocabulary() -> frozenset[str]:
    """Every word that the grammar can write."""
    texts = beats()
    texts += [word for words in (*ROLES.values(), *WORDS.values()) for word in words]
    plain = " ".join(re.sub(r"{\w+}|[Aa]\(n\)|[\[\]|]", " ", text) for text in texts)
    return frozenset(word.lower() for word in re.findall(r"[A-Za-z]+", plain)) | {"an", "a"}


def _told_rightly(found: list[tuple[str, str]], cast: tuple[str, str | None]) -> bool:
    """Whether the pronouns of a beat, `(role, word)` each, are those of whom they stand for.

    That is who has the role's name in this beat; if nobody has it, the other one of the two than
    who has the other role's name; if the beat names nobody, whom the grammar means.
    """
    spelled = {name.lower(): name for name in PRONOUN_OF}
    named = {role: spelled[word] for role, word in found if role in ("hero", "pal")}
    hero, pal = cast
    meant = {"hero": hero, "pal": pal} if not named else dict(named)
    for role, other in (("hero", "pal"), ("pal", "hero")):
        if role not in meant and meant[other] in cast:
            meant[role] = pal if meant[other] == hero else hero
    for role, word in found:
        if role in ("hero", "pal"):
            continue
        who = meant.get("pal" if role in PAL_FORMS else "hero")
        forms = dict(zip(FORMS, PRONOUNS[PRONOUN_OF[who]], strict=True)) if who else {}
        if forms.get(role.removeprefix("p"), word) != word:
            return False
    return True


def judge(story: str) -> Judged:
    """Judges a whole story, paragraphs with a blank line between them."""
    named = list(dict.fromkeys(re.findall(rf"\b({'|'.join(PRONOUN_OF)})\b", story)))
    if not named:
        return Judged(("nobody is named",), 0, 0)
    hero, friend = named[0], named[1] if len(named) > 1 else None
    slips = [f"{name} is a third name" for name in named[2:]]
    if friend and PRONOUN_OF[friend] == PRONOUN_OF[hero]:
        slips.append(f"{friend} is {PRONOUN_OF[friend]} as {hero} is")
    kinds = list(dict.fromkeys(re.findall(rf"\b({'|'.join(KINDS)})\b", story)))
    slips += [f"a {kind} is a third kind" for kind in kinds[2:]]
    words = re.findall(r"\b[A-Z][A-Za-z]*", story)
    slips += [f"{word} is nobody" for word in words if word.lower() not in vocabulary()]
    cast, known, others = (hero, friend), 0, 0
    for paragraph in story.split("\n\n"):
        start = 0
        while start < len(paragraph):
            told = [
                (match.end(), _told_rightly(found, cast))
                for pattern in patterns()
                if (match := pattern.expression.match(paragraph, start))
                for found in [
                    [
                        (role, word.lower())
                        for role, word in zip(pattern.roles, match.groups(), strict=True)
                        if word
                    ]
                ]
            ]
            if told:
                end, right = max(told, key=lambda each: (each[1], each[0]))
                known += 1
                if not right:
                    slips.append(f"not of {hero} and {friend}: {paragraph[start:end]}")
            else:
                match = _SENTENCE_END.search(paragraph, start)
                end = match.end() - 1 if match and match.end() < len(paragraph) else len(paragraph)
                others += 1
            start = end + 1
    return Judged(tuple(slips), known, others)


def openings(count: int, seed: int = SEED) -> list[str]:
    """The first sentence of stories that nobody was trained on: it names the hero."""
    return [re.split(r"(?<=[.]) ", story)[0] for story in stories(count, seed)]


def continued(lm: jaxllm.LM, prompts: list[str], batch: int, **options: float) -> list[str | None]:
    """Each prompt with the model's continuation; None where it does not end in the context."""
    room = lm.config.context_length - max(len(lm.encode(prompt)) for prompt in prompts)
    told: list[str | None] = []
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        found = lm.generate(some, max_new_tokens=room, **options)
        told += [
            prompt + done.text if done.finish_reason == "eos" else None
            for prompt, done in zip(some, found, strict=True)
        ]
    return told


def rate(told: Sequence[str | None]) -> tuple[float, list[Judged]]:
    """The share of stories without a slip, and what was found in each."""
    judged = [judge(story) if story else Judged(("it does not end",), 0, 0) for story in told]
    return sum(not each.slips for each in judged) / len(judged), judged


def main() -> None:
    """The command line: a line for each model and each way of sampling."""
    parser = argparse.ArgumentParser(
        description="Count the stories in which a model keeps names and pronouns.",
        epilog="example: python scripts/demo_models/story_consistency.py jaxllm/demo/llama",
    )
    parser.add_argument("models", nargs="+", help="directories")
    parser.add_argument("--count", type=int, default=256, help="stories (default 256)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of sampling (default 0.8)")
    parser.add_argument("--show", type=int, default=0, help="print so many stories with slips")
    options = parser.parse_args()
    prompts = openings(options.count)
    for model in options.models:
        lm = jaxllm.load(model)
        for temperature in (0.0, options.temperature):
            drawn = {"temperature": temperature, "seed": 0} if temperature else {}
            told = continued(lm, prompts, 64, **drawn)
            kept, judged = rate(told)
            known, others = (sum(getattr(j, n) for j in judged) for n in ("beats", "others"))
            how = f"temperature {temperature}" if temperature else "greedy"
            print(
                f"{model}, {how}: {100 * kept:.1f}% of {len(told)} stories keep names and pronouns"
                f" ({100 * known / max(1, known + others):.1f}% of sentences are beats)"
            )
            slipped = [(t, j) for t, j in zip(told, judged, strict=True) if j.slips]
            for story, each in slipped[: options.show]:
                print(f"\n{story}\n  SLIPS: {'; '.join(each.slips)}\n")


if __name__ == "__main__":
    main()
