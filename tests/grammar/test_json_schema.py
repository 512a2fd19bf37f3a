"""Grammars of JSON schemas: each instance is judged by `jsonschema` too, or refused by name."""

import json
import re
from typing import Any

import jsonschema
import pytest

from jaxllm.errors import GrammarError
from jaxllm.grammar import Grammar


def an_object(required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object; the names of required properties have spaces between them."""
    return {"type": "object", "properties": properties, "required": required.split()}


CLOSED = {"additionalProperties": False}
PET = an_object("name", name={"type": "string"}, legs={"type": "integer"})
POINT = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}
NODE = {"$ref": "#/$defs/node"}
KIDS = {"type": "array", "items": NODE}
TREE = {
    **NODE,
    "$defs": {"node": an_object("label", label={"type": "string"}, children=KIDS) | CLOSED},
}
STEP = an_object(
    "do",
    do={"enum": ["mix", "bake", "wait"]},
    minutes={"type": "integer", "minimum": 1, "maximum": 90},
)
RECIPE = CLOSED | an_object(
    "title steps",
    title={"type": "string", "minLength": 1, "maxLength": 12},
    steps={"type": "array", "items": STEP | CLOSED, "minItems": 1, "maxItems": 2},
    vegan={"type": ["boolean", "null"]},
)
SHAPE = {
    "oneOf": [
        an_object("kind radius", kind={"const": "circle"}, radius={"type": "number"}),
        an_object("kind side", kind={"const": "square"}, side={"type": "number"}),
    ]
}

# A schema, the instances that it describes, and some that it does not.
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "null"}, [None], [0, "null"]),
    ({"type": "boolean"}, [True, False], [1, "true"]),
    ({"type": "integer"}, [0, -17, 12345678901234567890], [1.5, "1", None]),
    ({"type": "number"}, [2, -0.25, 3e8], ["2", True]),
    ({"type": "string"}, ["", "naïve 日本", 'a "b"\n'], [1, None]),
    ({"type": ["integer", "null"]}, [4, None], ["4", 4.5]),
    ({}, [[{}], "x", -1], []),
    (True, [[1, "a"], {"b": None}], []),
    ({"enum": ["red", 7, None, ["a"]]}, ["red", 7, None, ["a"]], ["blue", 8, False, []]),
    ({"const": {"unit": "kg"}}, [{"unit": "kg"}], [{"unit": "g"}, {}, "kg"]),
    (PET, [{"name": "Rex"}, {"name": "Rex", "legs": 4}], [{}, {"legs": 4}, {"name": 3}]),
    (PET, [{"name": "Rex", "age": [3]}], [{"name": "Rex", "legs": "four"}]),
    ({**PET, **CLOSED}, [{"name": "Ivy"}], [{"name": "Ivy", "age": 3}]),
    ({**PET, "additionalProperties": {"type": "boolean"}}, [{"name": "Ivy", "tame": True}],
     [{"name": "Ivy", "tame": "yes"}]),
    ({"type": "object", "patternProperties": {"^n_": {"type": "integer"}}},
     [{"n_a": 1}, {"other": "x"}], [{"n_a": "one"}]),
    ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [[1, "2"], {}]),
    ({"type": "array", "items": {}, "minItems": 2, "maxItems": 3}, [[1, 2], [None, 3]], [[1]]),
    ({"type": "array", "maxItems": 1}, [[], [None]], [[1, 2]]),
    (POINT, [[1, "a"], [1], [1, "a", None]], [["a", 1]]),
    ({**POINT, "items": False}, [[1, "a"]], [[1, "a", 2]]),
    ({**POINT, "items": {"type": "null"}, "minItems": 2}, [[1, "a", None]], [[1], [1, "a", 3]]),
    ({"type": "integer", "minimum": -3, "maximum": 12}, [-3, 0, 12], [-4, 13]),
    ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 8}, [6, 7], [5, 8]),
    ({"type": "number", "minimum": 0.5, "maximum": 2}, [0.5, 1.75, 2], [0.49, 2.01, -1]),
    ({"type": "number", "exclusiveMinimum": 0}, [0.001, 5], [0, -1]),
    ({"type": "integer", "multipleOf": 6}, [0, 18, -6], [4, 20]),
    ({"type": "integer", "multipleOf": 5, "minimum": 10}, [10, 25], [5, 12]),
    ({"type": "number", "multipleOf": 0.5}, [1.5, 2], [1.25]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "日本語"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ["AB-12"], ["ab-1", "AB-", "xAB-1"]),
    ({"type": "string", "pattern": "cat"}, ["cat", "a cat sat"], ["dog", ""]),
    ({"type": "string", "format": "date"}, ["2031-05-17"], ["2031-13-01", "today"]),
    ({"type": "string", "format": "date-time"}, ["2031-05-17T08:30:00Z"], ["2031-05-17"]),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.254"], ["10.0.0.256", "10.0.0"]),
    ({"type": "string", "format": "email"}, ["ada@example.org"], ["ada"]),
    ({"type": "string", "format": "uuid"}, ["0f8fad5b-d9cb-469f-a165-70867728950e"],
     ["0f8fad5b-d9cb"]),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]}, [9, "ab"], ["abc", 1.5]),
    ({"type": "string", "anyOf": [{"pattern": "^a"}, {"pattern": "z$"}]}, ["ab", "yz", "az"],
     ["bc"]),
    (SHAPE, [{"kind": "circle", "radius": 2}, {"kind": "square", "side": 1.5}],
     [{"kind": "circle", "side": 2}, {"kind": "line"}, {"radius": 2}]),
    ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, [3, None], ["3"]),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]}, [3, 6], [2, 7]),
    ({"allOf": [PET, {"properties": {"legs": {"maximum": 8}}, "required": ["legs"]}]},
     [{"name": "Ann", "legs": 8}], [{"name": "Ann", "legs": 9}, {"name": "Ann"}]),
    ({"$defs": {"size": {"enum": ["S", "L"]}}, "items": {"$ref": "#/$defs/size"}},
     [["S", "L"], []], [["M"]]),
    ({"$schema": "http://json-schema.org/draft-07/schema#",
      "definitions": {"id": {"type": "integer", "minimum": 1}},
      "properties": {"id": {"$ref": "#/definitions/id"}}}, [{"id": 1}, {}], [{"id": 0}]),
    (TREE, [{"label": "a"}, {"label": "a", "children": [{"label": "b", "children": []}]}],
     [{"label": "a", "children": [{"label": 2}]}, {"children": []}, {"label": "a", "kids": []}]),
    (RECIPE, [
        {"title": "Bread", "steps": [{"do": "mix"}, {"do": "bake", "minutes": 40}]},
        {"title": "Tea", "steps": [{"do": "wait", "minutes": 3}], "vegan": None},
    ], [
        {"title": "Bread", "steps": []},
        {"title": "", "steps": [{"do": "mix"}]},
        {"title": "Bread", "steps": [{"do": "fry"}]},
        {"title": "Bread", "steps": [{"do": "bake", "minutes": 91}]},
        {"title": "Bread", "steps": [{"do": "mix"}], "vegan": "no"},
    ]),
]  # fmt: skip
REFUSED = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"maxLength": 3}},
    "contains": {"contains": {"const": 1}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "propertyNames": {"propertyNames": {"format": "date"}},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "unevaluatedItems": {"unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#node"},
    "minProperties": {"type": "object", "minProperties": 2},
    "oneOf": {"oneOf": [{"minimum": 1}, {"maximum": 5}]},
    "const": {"const": "bell \x07"},
    "enum": {"enum": [{"a": ["\x7f"]}]},
    "contentEncoding": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "contentEncoding": "base64",
    },
    "lenient": {"x-guidance": {"lenient": True}},
    "coerce_one_of": {"x-guidance": {"coerce_one_of": True}},
    "json_allowed_escapes": {"x-guidance": {"json_allowed_escapes": 'u"'}},
    "x-guidance must be": {"x-guidance": 1},
    "the schema false": False,
    "http://example.org/other": {"$ref": "http://example.org/other"},
}


def _dump(instance: Any) -> str:
    return json.dumps(instance, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=lambda x: _dump(x)[:40])
def test_grammar_agrees_with_jsonschema(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    """On compact JSON and on indented JSON."""
    checker = jsonschema.FormatChecker()
    judge = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    grammar = Grammar.json_schema(schema)
    for instance, allowed in [(x, True) for x in valid] + [(x, False) for x in invalid]:
        if schema is not True and schema.get("format") not in ("date-time", "uuid"):  # extras
            assert judge(schema, format_checker=checker).is_valid(instance) == allowed
        assert grammar.complete(_dump(instance)) == allowed, instance
        indented = json.dumps(instance, indent=1, ensure_ascii=False)
        assert grammar.complete(indented) == allowed, instance


@pytest.mark.parametrize("word", REFUSED)
def test_unsupported_keyword_is_refused_by_name(word: str) -> None:
    """At the top, and within a property, with its place."""
    schema = REFUSED[word]
    with pytest.raises(GrammarError, match=re.escape(word)):
        Grammar.json_schema(schema).complete("1")
    if isinstance(schema, dict) and schema.keys().isdisjoint({"x-guidance", "$schema", "$ref"}):
        with pytest.raises(GrammarError, match=re.escape(word)):
            Grammar.json_schema({"properties": {"a": schema}}).complete("1")


def test_key_spelled_otherwise_is_no_other_key() -> None:
    r"""A listed name cannot return as one of the other keys, neither plainly nor with \u."""
    grammar = Grammar.json_schema({"properties": {"a": {"type": "integer"}}})
    assert grammar.complete('{"a":1,"b":"x"}')
    for text in (r'{"\u0061":"x"}', r'{"a":1,"\u0061":"x"}', '{"a":1,"a":"x"}'):
        assert not grammar.complete(text)


def test_keywords_as_names_are_no_keywords() -> None:
    """Names of properties, definitions, and values are not read as keywords."""
    names = {"not": {"type": "integer"}, "minProperties": {"type": "null"}}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {**names, "contentEncoding": {"enum": [{"minProperties": 9}]}},
        "definitions": {"contentEncoding": {}},
        "default": {"contentEncoding": 1},
    }
    grammar = Grammar.json_schema(schema)
    assert grammar.complete('{"not":1,"minProperties":null,"contentEncoding":{"minProperties":9}}')
    with pytest.raises(GrammarError, match=r"at /properties/b/not$"):
        Grammar.json_schema({"properties": {"not": {}, "b": {"not": {}}}}).complete("{}")


def test_least_number_of_keys_counts_required_ones() -> None:
    """One more than the required keys is the most that repeated keys cannot fake."""
    grammar = Grammar.json_schema(
        {"properties": {"a": {}}, "required": ["a"], "minProperties": 2, "type": "object"}
    )
    assert grammar.complete('{"a":1,"b":2}') and not grammar.complete('{"a":1}')
    assert not grammar.complete('{"a":1,"a":2}')


def test_schema_within_lark_is_held_to() -> None:
    """Whitespace is bounded, keys are not spelled otherwise, and keywords are refused by name."""
    schema = {"type": "object", "properties": {"a": {"const": "%json {"}, "b": {"type": "null"}}}
    grammar = Grammar.lark(f'start: "<" %json {json.dumps(schema)} ">"')
    assert grammar.complete('<{"a": "%json {", "b": null}>')
    assert grammar.allows("<{" + " " * 8) and not grammar.allows("<{" + " " * 9)
    assert not grammar.allows(r'<{"\u0061":')
    with pytest.raises(GrammarError, match="minProperties 2"):
        Grammar.lark('start: %json {"minProperties": 2}').complete("{}")
    with pytest.raises(GrammarError, match="is not supported"):
        Grammar.lark('start: %json {"type": }').complete("{}")
