"""The official JSON Schema test suite against the grammars of JSON schemas, for docs/grammar.md.

One decision: a schema that is refused by name is no mistake, since its user sees it. A mistake is
an instance that the grammar treats otherwise than the suite. Formats that are annotations here are
left out: the suite's tests of them are for programs that assert them. A grammar fixes the order of
keys, so an instance is written twice: as the suite writes it, and in the order of the schema's
properties. It is allowed if the grammar takes one of the two texts.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python scripts/benchmarks/json_schema_suite.py JSON-Schema-Test-Suite/tests --list
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.errors import GrammarError
from jaxllm.grammar import Grammar
from jaxllm.grammar.json_schema import FORMATS, subschemas

DRAFTS = {
    "4": "http://json-schema.org/draft-04/schema#",
    "6": "http://json-schema.org/draft-06/schema#",
    "7": "http://json-schema.org/draft-07/schema#",
    "2019-09": "https://json-schema.org/draft/2019-09/schema",
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
}
OUTCOMES = ("right", "refused by name", "wrongly refused", "wrongly allowed")
GROUPS = ("required", "optional", "formats")


class Case(NamedTuple):
    """An instance of the suite, with what became of it, one of `OUTCOMES`."""

    group: str
    file: str
    schema: Any
    description: str
    instance: Any
    outcome: str
    message: str = ""


def run_draft(suite: Path, draft: str) -> Iterator[Case]:
    """Yield the cases of a draft."""
    folder = suite / f"draft{draft}"
    for path in sorted(folder.rglob("*.json")):
        name = str(path.relative_to(folder))
        group = "required"
        if name.startswith("optional"):
            group = "formats" if "format" in name else "optional"
        for entry in json.loads(path.read_text(encoding="utf-8")):
            schema = entry["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            if group == "formats" and set(find_formats(schema)) - FORMATS:
                continue
            grammar = Grammar.json_schema(schema)
            message = refusal(grammar)
            for test in entry["tests"]:
                outcome = OUTCOMES[1] if message else judge(grammar, schema, test)
                description = f"{entry['description']}: {test['description']}"
                yield Case(group, name, schema, description, test["data"], outcome, message)


def find_formats(schema: Any) -> list[str]:
    """Return the values of `format` in a schema."""
    return [str(inner["format"]) for _, inner in subschemas(schema) if "format" in inner]


def refusal(grammar: Grammar) -> str:
    """Return the message with which a grammar is refused, "" if it is not."""
    try:
        grammar.complete("")
    except GrammarError as error:
        return str(error)
    return ""


def judge(grammar: Grammar, schema: Any, test: Any) -> str:
    """Return whether the grammar treats an instance as the suite does."""
    texts = (dump(test["data"]), dump(in_schema_order(test["data"], property_ranks(schema))))
    allowed = any(grammar.complete(text) for text in texts)
    if allowed == test["valid"]:
        return "right"
    return "wrongly allowed" if allowed else "wrongly refused"


def dump(instance: Any) -> str:
    """Return an instance as compact JSON."""
    return json.dumps(instance, separators=(",", ":"), ensure_ascii=False)


def property_ranks(schema: Any) -> dict[str, int]:
    """Return the place of each name among all `properties` of a schema."""
    ranks: dict[str, int] = {}
    if isinstance(schema, dict):
        for key in ("properties", "required"):
            names = schema.get(key, ())
            for name in names if isinstance(names, dict | list) else ():
                ranks.setdefault(str(name), len(ranks))
        schema = list(schema.values())
    for inner in schema if isinstance(schema, list) else ():
        for name in property_ranks(inner):
            ranks.setdefault(name, len(ranks))
    return ranks


def in_schema_order(value: Any, ranks: dict[str, int]) -> Any:
    """Return an instance with the keys of its objects in the order of the schema."""
    if isinstance(value, list):
        return [in_schema_order(inner, ranks) for inner in value]
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: ranks.get(name, len(ranks)))
        return {name: in_schema_order(value[name], ranks) for name in names}
    return value


def format_table(cases: dict[str, list[Case]]) -> str:
    """Return the numbers of cases of each draft as a Markdown table."""
    lines = ["| draft | cases | all | " + " | ".join(OUTCOMES) + " |"]
    lines.append("|---|---|" + "---:|" * (1 + len(OUTCOMES)))
    for draft, found in cases.items():
        for group in GROUPS:
            counts = Counter(case.outcome for case in found if case.group == group)
            cells = " | ".join(str(counts[outcome]) for outcome in OUTCOMES)
            lines.append(f"| {draft} | {group} | {counts.total()} | {cells} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the suite and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", type=Path, help="the suite's folder tests")
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument("--list", action="store_true", help="print each mistake on stderr")
    options = parser.parse_args(arguments)
    cases = {draft: list(run_draft(options.suite, draft)) for draft in options.drafts}
    for draft, found in cases.items():
        for case in found if options.list else ():
            if case.outcome in OUTCOMES[2:]:
                print(
                    f"{case.outcome}: draft {draft} {case.file}: {case.description}\n"
                    f"    schema {dump(case.schema)}\n    instance {dump(case.instance)}",
                    file=sys.stderr,
                )
    print(format_table(cases))


if __name__ == "__main__":
    main()
