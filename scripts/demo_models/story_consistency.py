"""Consistency of a model's characters: the share of stories without an error in names or pronouns.

One decision: a story is judged by its text alone. Its hero is the first character that it names,
the friend the second; in the grammar's stories their pronouns differ. An error is

* the name of a third character, or a third kind of animal or child,
* a friend with the hero's pronoun,
* a capitalized word that the grammar does not have,
* a sentence of the grammar with a wrong pronoun. If the sentence names no character, its pronouns
  must be those of the grammar's roles ("{He} loved to {habit}." refers to the hero); otherwise, its
  pronouns must fit the characters that it names.

Other sentences are judged by the first three rules; `Judgment.others` counts them. A story that
does not end within the model's context counts as an error.

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
from scripts.demo_models.story_grammar import draw_stories, list_sentences

SEED = 1_000_003  # of the openings: no model was trained on these stories
PRONOUN_OF = {name: pronoun for pronoun, names in NAMES.items() for name in names}
# The words of a character's placeholders: names, and forms of the pronouns she and he.
_FORM_PAIRS = zip(*PRONOUNS.values(), strict=True)
FORMS = dict(zip(("he", "him", "his", "himself"), _FORM_PAIRS, strict=True))
ROLES: dict[str, Row] = {
    "hero": tuple(PRONOUN_OF),
    "pal": tuple(PRONOUN_OF),
    **{f"{prefix}{form}": words for prefix in ("", "p") for form, words in FORMS.items()},
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


class Judgment(NamedTuple):
    """The errors of a story."""

    errors: tuple[str, ...]
    known: int
    """Number of sentences of the grammar."""
    others: int
    """Number of other sentences."""


class Pattern(NamedTuple):
    """A sentence of the grammar as a regular expression."""

    expression: re.Pattern[str]
    roles: tuple[str, ...]
    """The placeholder of each group."""


def _make_expression(text: str, roles: list[str]) -> str:
    """Return a regular expression for all texts of a sentence; append its roles to `roles`."""
    pieces = []
    for part in _PARTS.split(text):
        if part.startswith("["):
            options = [_make_expression(option, roles) for option in part[1:-1].split("|")]
            pieces.append(f"(?:{'|'.join(options)})")
        elif part.startswith("{"):
            name = part[1].lower() + part[2:-1]
            if name in ROLES:
                roles.append(name)
                pieces.append(rf"\b({'|'.join(ROLES[name])})\b")
            else:
                cells = [_make_expression(cell, roles) for cell in WORDS[name]]
                pieces.append(f"(?:{'|'.join(cells)})")
        else:
            pieces.append("an? " if part.lower() == "a(n) " else re.escape(part))
    return "".join(pieces)


@cache
def compile_patterns() -> tuple[Pattern, ...]:
    """Return the patterns of all sentences."""
    patterns = []
    for sentence in list_sentences():
        roles: list[str] = []
        expression = _make_expression(sentence, roles) + r"(?= |$)"
        patterns.append(Pattern(re.compile(expression, re.IGNORECASE), tuple(roles)))
    return tuple(patterns)


@cache
def list_vocabulary() -> frozenset[str]:
    """Return every word of the grammar, in lower case."""
    texts = list_sentences()
    texts += [word for words in (*ROLES.values(), *WORDS.values()) for word in words]
    plain = " ".join(re.sub(r"{\w+}|[Aa]\(n\)|[\[\]|]", " ", text) for text in texts)
    return frozenset(word.lower() for word in re.findall(r"[A-Za-z]+", plain)) | {"an", "a"}


def _pronouns_fit(words: list[tuple[str, str]], cast: tuple[str, str | None]) -> bool:
    """Return whether the pronouns of a sentence, as `(role, word)`, fit their characters.

    A role's character is the one with the role's name in this sentence. If only the other role has
    a name, it is the other character. If no role has one, it is the cast's hero or friend.
    """
    spellings = {name.lower(): name for name in PRONOUN_OF}
    named = {role: spellings[word] for role, word in words if role in ("hero", "pal")}
    hero, pal = cast
    characters = {"hero": hero, "pal": pal} if not named else dict(named)
    for role, other in (("hero", "pal"), ("pal", "hero")):
        if role not in characters and characters[other] in cast:
            characters[role] = pal if characters[other] == hero else hero
    for role, word in words:
        if role in ("hero", "pal"):
            continue
        character = characters.get("pal" if role in PAL_FORMS else "hero")
        forms = dict(zip(FORMS, PRONOUNS[PRONOUN_OF[character]], strict=True)) if character else {}
        if forms.get(role.removeprefix("p"), word) != word:
            return False
    return True


def judge(story: str) -> Judgment:
    """Judge a complete story, with blank lines between its paragraphs."""
    named = list(dict.fromkeys(re.findall(rf"\b({'|'.join(PRONOUN_OF)})\b", story)))
    if not named:
        return Judgment(("no character is named",), 0, 0)
    hero, friend = named[0], named[1] if len(named) > 1 else None
    errors = [f"{name} is a third name" for name in named[2:]]
    if friend and PRONOUN_OF[friend] == PRONOUN_OF[hero]:
        errors.append(f"{hero} and {friend} have the same pronoun: {PRONOUN_OF[hero]}")
    kinds = list(dict.fromkeys(re.findall(rf"\b({'|'.join(KINDS)})\b", story)))
    errors += [f"{kind} is a third kind" for kind in kinds[2:]]
    capitalized = re.findall(r"\b[A-Z][A-Za-z]*", story)
    vocabulary = list_vocabulary()
    errors += [
        f"{word} is an unknown word" for word in capitalized if word.lower() not in vocabulary
    ]
    cast, known, others = (hero, friend), 0, 0
    for paragraph in story.split("\n\n"):
        start = 0
        while start < len(paragraph):
            matches = [
                (match.end(), _pronouns_fit(words, cast))
                for pattern in compile_patterns()
                if (match := pattern.expression.match(paragraph, start))
                for words in [
                    [
                        (role, word.lower())
                        for role, word in zip(pattern.roles, match.groups(), strict=True)
                        if word
                    ]
                ]
            ]
            if matches:
                end, fits = max(matches, key=lambda pair: (pair[1], pair[0]))
                known += 1
                if not fits:
                    errors.append(f"wrong pronoun ({hero}, {friend}): {paragraph[start:end]}")
            else:
                match = _SENTENCE_END.search(paragraph, start)
                end = match.end() - 1 if match and match.end() < len(paragraph) else len(paragraph)
                others += 1
            start = end + 1
    return Judgment(tuple(errors), known, others)


def draw_openings(count: int, seed: int = SEED) -> list[str]:
    """Return the first sentences, which name the hero, of stories that no model was trained on."""
    return [re.split(r"(?<=[.]) ", story)[0] for story in draw_stories(count, seed)]


def generate_stories(
    lm: jaxllm.LM, prompts: list[str], batch: int, **options: float
) -> list[str | None]:
    """Return each prompt with the model's continuation, or None if it exceeds the context."""
    max_new = lm.config.context_length - max(len(lm.encode(prompt)) for prompt in prompts)
    stories: list[str | None] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        completions = lm.generate(part, max_new_tokens=max_new, **options)
        stories += [
            prompt + done.text if done.finish_reason == "eos" else None
            for prompt, done in zip(part, completions, strict=True)
        ]
    return stories


def rate_stories(stories: Sequence[str | None]) -> tuple[float, list[Judgment]]:
    """Return the share of stories without an error, and each story's judgment."""
    judgments = [
        judge(story) if story else Judgment(("the story does not end",), 0, 0) for story in stories
    ]
    return sum(not judgment.errors for judgment in judgments) / len(judgments), judgments


def main() -> None:
    """Print a line for each model, with greedy decoding and with sampling."""
    parser = argparse.ArgumentParser(
        description="Count the stories in which a model's names and pronouns are consistent.",
        epilog="example: python scripts/demo_models/story_consistency.py jaxllm/demo/llama",
    )
    parser.add_argument("models", nargs="+", help="model directories")
    parser.add_argument("--count", type=int, default=256, help="stories per model (default: 256)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="sampling temperature (default: 0.8)"
    )
    parser.add_argument("--show", type=int, default=0, help="stories with errors to print")
    options = parser.parse_args()
    prompts = draw_openings(options.count)
    for model in options.models:
        lm = jaxllm.load(model)
        for temperature in (0.0, options.temperature):
            sampling = {"temperature": temperature, "seed": 0} if temperature else {}
            stories = generate_stories(lm, prompts, 64, **sampling)
            share, judgments = rate_stories(stories)
            known, others = (sum(getattr(j, n) for j in judgments) for n in ("known", "others"))
            mode = f"temperature {temperature}" if temperature else "greedy"
            print(
                f"{model}, {mode}: names and pronouns are consistent in {100 * share:.1f}%"
                f" of {len(stories)} stories"
                f" ({100 * known / max(1, known + others):.1f}% of sentences are the grammar's)"
            )
            wrong = [(s, j) for s, j in zip(stories, judgments, strict=True) if j.errors]
            for story, judgment in wrong[: options.show]:
                print(f"\n{story}\n  ERRORS: {'; '.join(judgment.errors)}\n")


if __name__ == "__main__":
    main()
