"""What a JSON schema has beyond llguidance: exact numbers, counted keys, sets, look-around."""

import json
import random
import re
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from jaxllm.errors import GrammarError
from jaxllm.grammar import Grammar
from jaxllm.grammar.json_numbers import BOUNDS, number_terminals
from tests.grammar.vocabularies import vocabulary

BIG, NEXT = 2**53, 2**53 + 1
PLAIN_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # pydantic's, of Decimal
ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
NODE = {
    "type": "object",
    "properties": {
        "id": {"const": NEXT},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        "kind": {"$ref": "#/$defs/kind"},
    },
    "required": ["id"],
    "additionalProperties": False,
}
ROW = {
    "type": "object",
    "properties": {"id": {"type": "integer", "maximum": 2**63 - 1}, "name": {"type": "string"}},
    "required": ["id"],
}
COUNTED = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {}, "c": {"const": 1}},
    "required": ["b"],
    "maxProperties": 2,
}
SET = {"type": "array", "uniqueItems": True, "items": {"enum": ["a", 1, [0]]}}
# A schema, texts of it, and others. Keys come in the order of the schema.
CASES: list[tuple[Any, str, str]] = [
    ({"const": 1234567890123456789}, "1234567890123456789", "1234567890123456768"),
    ({"const": {"a": 1e-7}}, '{"a":1e-7} {"a":0.0000001} {"a":1e-07}', '{"a":1e-8} {"a":1}'),
    ({"enum": [1e22, {"id": [NEXT, None]}]}, f'1e22 1e+22 {10**22} {{"id":[{NEXT},null]}}',
     f'{10**22 + 1} {{"id":[{BIG},null]}} 1e21'),
    ({"type": "integer", "minimum": NEXT}, f"{NEXT} {10**20}", f"{BIG} 1 -{NEXT}"),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, f"{10**19} {2**64 - 1} 0",
     f"{2**64} -1 {10**20}"),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
     f"{-(2**63)} {2**63 - 1} 0 -5", f"{-(2**63) - 1} {2**63} 1.5"),
    ({"exclusiveMinimum": BIG, "exclusiveMaximum": BIG + 2}, f'{NEXT} {BIG}.5 "a" null [1]',
     f"{BIG} {BIG + 2} 1"),
    ({"type": "number", "minimum": -1e308, "maximum": 1e308}, f"1.5 -2 -{'9' * 308}", "9" * 309),
    ({"type": "number", "minimum": 5e-324, "maximum": 1.0}, "1 0.5 0.001", "0 1.5 -1"),
    ({"type": "number", "minimum": NEXT, "maximum": NEXT}, f"{NEXT} {NEXT}.0",
     f"{BIG} {NEXT + 1} {NEXT}.5"),
    ({"type": ["integer", "null"], "minimum": NEXT}, f"null {NEXT}", f'{BIG} "a"'),
    (ROW, f'{{"id":{2**63 - 1}}} {{"id":1,"name":"x","z":[{{}}]}}',
     f'{{"id":{2**63}}} {{"name":"x"}} {{"id":1,"name":2}}'),
    ({**ROW, "additionalProperties": {"type": "null"}}, '{"id":1,"z":null}', '{"id":1,"z":1}'),
    ({"$ref": "#/$defs/node", "$defs": {"node": NODE, "kind": {"enum": ["a"]}}},
     f'{{"id":{NEXT},"next":{{"id":{NEXT},"next":null}},"kind":"a"}}',
     f'{{"id":{BIG}}} {{"id":{NEXT},"next":{{"id":{BIG}}}}} {{"id":{NEXT},"kind":"b"}}'),
    ({"$ref": "#/$defs/a%20~1b", "$defs": {"a /b": {"const": NEXT}}}, f"{NEXT}", f"{BIG}"),
    ({"type": "array", "prefixItems": [{"const": NEXT}, {"type": "null"}], "items": False,
      "minItems": 1}, f"[{NEXT}] [{NEXT},null]", f"[] [{BIG}] [{NEXT},null,1] [{NEXT},{NEXT}]"),
    ({"type": "array", "items": {"const": NEXT}, "minItems": 1, "maxItems": 2},
     f"[{NEXT}] [{NEXT},{NEXT}]", f"[] [{NEXT},{NEXT},{NEXT}] [{BIG}]"),
    (COUNTED, '{"b":1} {"a":1,"b":[]} {"b":1,"z":1}',
     '{"a":1,"b":1,"c":1} {"b":1,"z":1,"y":2} {"a":1} {"a":"x","b":1}'),
    ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False,
      "minProperties": 2, "maxProperties": 2}, '{"a":1,"b":2} {"b":1,"c":3}',
     '{} {"a":1} {"a":1,"b":2,"c":3}'),
    ({**SET, "minItems": 1}, '["a"] [[0],"a",1] [1,[0]]', '[] ["a","a"] [1,[0],1] ["b"]'),
    ({"type": "array", "uniqueItems": True, "items": {"type": "boolean"}}, "[] [true,false]",
     "[true,true] [1]"),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, "[] [3]", "[1,2]"),
    ({"uniqueItems": False}, "[1,1]", ""),
    ({"propertyNames": {"type": "string"}}, '{"a":1} 3', ""),
    ({"type": "object", "propertyNames": {"pattern": "^[0-9]+$"},
      "additionalProperties": {"type": "integer"}}, '{"1":1} {}', '{"x":1} {"1":"a"}'),
    ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}, '{"aé":1}',
     '{"a":1} {"abcd":1}'),
    ({"type": "object", "propertyNames": {"$ref": "#/$defs/k"},
      "$defs": {"k": {"enum": ["a", "b"]}}, "additionalProperties": {"type": "null"}},
     '{} {"a":null,"b":null}', '{"c":null} {"a":1}'),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": PLAIN_DECIMAL}]},
     '"1.5" "+00.1" 2', '"." "" "a" "1.2.3"'),
    ({"type": "string", "pattern": ZOD_EMAIL, "format": "email", "maxLength": 9},
     '"a@b.co" "a.b@b.co"', '".a@b.co" "a..b@b.c" "a@b" "aaaa@bb.cc"'),
    ({"type": "string", "pattern": r"^(?=.*\d)\w+$"}, '"a1" "1"', '"a" "-1"'),
    *(({"type": "string", "format": name}, '"any"', "1") for name in (
        "password", "byte", "url", "regex", "uri-reference", "path", "binary", "unheard-of")),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=lambda x: str(x)[:40])
def test_grammar_agrees_with_jsonschema(schema: Any, valid: str, invalid: str) -> None:
    """Numbers are read exactly; texts are also those with spaces, and beginnings of them."""
    judge = jsonschema.Draft202012Validator(schema)
    grammar, spaced = Grammar.json_schema(schema, whitespace=""), Grammar.json_schema(schema)
    for texts, allowed in ((valid, True), (invalid, False)):
        for text in texts.split():
            read = Decimal if schema.keys() & {*BOUNDS} else float
            instance = json.loads(text, parse_float=read)
            assert judge.is_valid(instance) == allowed, text
            assert grammar.complete(text) == allowed, text
            wide = re.sub(r"(?<!^)([\]}:,])(?!$)", r" \1 ", text)
            assert spaced.complete(wide) == allowed, wide


def test_schema_as_text_keeps_its_digits() -> None:
    """A decimal that no float64 holds; a mapping that has it is refused, and so is NaN."""
    grammar = Grammar.json_schema('{"const": 0.1000000000000000055}')
    assert grammar.complete("0.1000000000000000055") and not grammar.complete("0.1")
    lark = Grammar.lark('start: "<" %json {"enum": [9007199254740993]} ">"')
    assert lark.complete("<9007199254740993>") and not lark.complete("<9007199254740992>")
    for schema in ('{"const": NaN}', {"const": float("inf")}):
        with pytest.raises(GrammarError, match="json_schema is not JSON"):
            Grammar.json_schema(schema)


def test_long_schemas_are_written() -> None:
    """Hundreds of keys, some of them counted, and of values."""
    names = [f"k{n}" for n in range(700)]
    big = {"type": "integer", "maximum": 2**63 - 1}
    grammar = Grammar.json_schema({"type": "object", "properties": dict.fromkeys(names, big)})
    assert grammar.complete('{"k3": 1, "k699": 2, "other": []}') and not grammar.complete(
        '{"k3":""}'
    )
    counted = {"type": "object", "properties": {k: {} for k in names[:60]}, "maxProperties": 2}
    grammar = Grammar.json_schema(counted)
    assert grammar.complete('{"k3":1,"k50":2}') and not grammar.complete('{"k3":1,"k50":2,"k59":3}')
    values = [NEXT] * 2000
    assert Grammar.json_schema({"const": values}).complete(json.dumps(values))


def test_bounds_hold_for_every_digit() -> None:
    """Random bounds, of decimals and of integers, against decimal arithmetic."""
    rng = random.Random(0)
    values = [0, 1, 5, 9, 10, 12, 100, 0.5, 0.25, 0.2, 12.25, 99.05, Decimal("0.250")]
    ends = ("", ".0", ".5", ".25", ".250", ".2", ".251", ".2499", ".05")
    texts = [f"{whole}{end}" for whole in (0, 1, 9, 10, 12, 99, 100, 101, 5, 50) for end in ends]
    passes = {
        "minimum": lambda x, b: x >= b,
        "maximum": lambda x, b: x <= b,
        "exclusiveMinimum": lambda x, b: x > b,
        "exclusiveMaximum": lambda x, b: x < b,
    }
    for _ in range(200):
        schema = {name: rng.choice([-1, 1]) * rng.choice(values) for name in BOUNDS
                  if rng.random() < 0.4}  # fmt: skip
        integer = rng.random() < 0.4
        found = number_terminals(schema, integer)
        for text in rng.sample(texts, 12):
            for sign, terminal in zip((1, -1), found, strict=True):
                value = sign * Decimal(text)
                if sign < 0 and not value:
                    continue
                bounds = ((passes[k], Decimal(str(b))) for k, b in schema.items())
                expected = all(test(value, b) for test, b in bounds) and not (
                    integer and "." in text
                )
                parts = [part.strip("/") for part in terminal.split(" & ")]
                got = bool(terminal) and all(re.fullmatch(part, text) for part in parts)
                assert got == expected, (schema, sign, text)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "minimum": NEXT, "multipleOf": 5}, f"number {NEXT} is not supported"),
        ({"allOf": [{"minimum": NEXT}, {"maxLength": 3}]}, "at /, beside allOf"),
        ({"items": {"patternProperties": {"a": {"const": NEXT}}, "type": "object"}}, "at /items"),
        ({"$ref": "#x", "$defs": {"x": {"$anchor": "x", "const": NEXT}}}, "beside $ref"),
        ({"const": 10**401}, "more than 400 digits"),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "uniqueItems"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
        ({"type": "string", "pattern": "^(?!x).*$"}, "look-around"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf constraints are not supported"),
        ({"type": "number", "multipleOf": 0.07}, "at /multipleOf"),
    ],
)
def test_what_cannot_be_exact_is_refused(schema: Any, message: str) -> None:
    """By name, and without options of llguidance."""
    with pytest.raises(GrammarError, match=re.escape(message)) as error:
        Grammar.json_schema(schema).complete("1")
    assert not re.search("coerce_one_of|lenient|Enable|verbose", str(error.value))


def test_own_rules_mask_tokens() -> None:
    """Over a vocabulary: each token of a text is allowed, and its end just there."""
    words = vocabulary("demo:llama")
    schema = {"type": "object", "properties": {"id": {"const": NEXT}, "set": SET}}
    compiled = Grammar.json_schema(schema).compile(words)
    state = compiled.start
    for token in words.encode(f'{{"id": {NEXT}, "set": ["a", 1]}}'.encode()):
        assert not compiled.is_complete(state)
        state = compiled.advance(state, token)
        assert state is not None
    assert compiled.is_complete(state)


@pytest.mark.parametrize("keyword", [
    "properties", "patternProperties", "$defs", "allOf", "anyOf", "oneOf", "prefixItems",
    "additionalProperties", "propertyNames", "not", "required", "type", "enum", "minLength",
    "maxItems", "minProperties",
])  # fmt: skip
def test_malformed_keyword_is_refused_by_name(keyword: str) -> None:
    """What the standard's own schema of schemas refuses is an error that names the keyword (but
    for empty lists, which some programs write).
    """
    values: list[Any] = [None, 5, 2**60, 1.5, {}, {"a": 5}, [[]], ["a", 5], [5], "x"]
    refused = 0
    for value in values:
        schema = {"properties": {"q": {"type": "object", keyword: value}}}
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError:
            refused += 1
            with pytest.raises(GrammarError, match=re.escape(keyword)):
                Grammar.json_schema(schema).complete("")
    assert refused > 2
