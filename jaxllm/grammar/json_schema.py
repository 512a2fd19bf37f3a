"""JSON schemas in llguidance's form, so that they are enforced as a whole or refused by name.

A schema goes to llguidance, without keywords of no effect. Keywords that llguidance lacks or reads
inexactly (numbers that no float64 holds, counts of optional keys, sets, look-around) become rules
here, and so does everything around them; the other parts stay llguidance's.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from jaxllm.errors import GrammarError
from jaxllm.grammar.json_numbers import (
    BOUNDS,
    is_inexact,
    is_number,
    number_terminals,
    spell_number,
    to_decimal,
)
from jaxllm.grammar.regex import DEAD, compile_regex

WHITESPACE = r"[ \n\t]{1,8}"  # at most this much in each place: models can repeat it for ever
FORMATS = {  # that llguidance enforces; the others are annotations, as the standard has it
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
}  # fmt: skip
_WEAKENING = (  # options of x-guidance
    "lenient",
    "coerce_one_of",
    "json_allowed_escapes",
    "json_allow_general_unicode_escapes",
)
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples", "x-guidance")  # keywords that hold no schemas
_ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment", "$schema", "$defs", "definitions", "x-guidance", "contentMediaType",
    "contentEncoding", "contentSchema",
}  # fmt: skip
_CONTROL = re.compile(r"(?<!\\)\\u00[01]|\x7f")  # in JSON: what llguidance would leave out
_OF_TYPE = {
    "null": set(), "boolean": set(), "number": {*BOUNDS, "multipleOf"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "additionalItems"},
    "object": {"properties", "required", "additionalProperties", "patternProperties",
               "minProperties", "maxProperties"},
}  # fmt: skip
_OF_TYPE["integer"] = _OF_TYPE["number"]
_KEY = r'"([^"\\\x00-\x1f\x7f]|\\["\\nrbtf])*"'  # a string of JSON with the escapes that we allow
_EMAIL = (  # without addresses in brackets and quotes, as llguidance has it
    r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]+(\.[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]+)*"
    r"@[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?)*"
)
_MAX_SET = 8  # values of a set: it has a rule for each of their subsets
_MAX_COUNTED = 64  # keys that are counted
_FORMS = {  # what a keyword must be, by the standard; the others are checked where they are used
    "a mapping of schemas": _BY_NAME,
    "a list of schemas": ("allOf", "anyOf", "oneOf", "prefixItems"),
    "a schema or a list of schemas": ("items", "additionalItems"),
    "a schema": ("additionalProperties", "propertyNames", "not", "contains"),
    "a list of texts": ("required",), "a text or a list of texts": ("type",), "a list": ("enum",),
    "a whole number": ("minLength", "maxLength", "minItems", "maxItems", "minProperties",
                 "maxProperties"),
}  # fmt: skip
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")


def schema_rules(schema: Any, whitespace: str, prefix: str = "json") -> tuple[str, list[str]]:
    """Return a JSON schema as an expression of Lark, and the rules that it uses.

    Args:
        whitespace: A regex for each place, "" for none.
        prefix: Of the rules' names.

    Raises GrammarError for what llguidance would take and not hold to.
    """
    if schema is False:
        raise GrammarError("the schema false describes no JSON")
    schema = {} if schema is True else schema
    options: dict[str, Any] = {"whitespace_flexible": bool(whitespace), "lenient": False}
    # Not \uXXXX: a key that spells a listed name so would be one of the other keys.
    options["json_allowed_escapes"] = r"nrbtf\""
    if whitespace:
        options["whitespace_pattern"] = whitespace
    own = schema.get("x-guidance", {})
    if not isinstance(own, Mapping):
        raise GrammarError(f"the schema's x-guidance must be a mapping: got {own!r:.60}")
    for name in _WEAKENING:
        if own.get(name):
            raise GrammarError(f"the schema's x-guidance asks for {name}, which would weaken it")
    asserts_content = "draft-07" in str(schema.get("$schema"))
    for place, inner in subschemas(schema):
        _check_subschema(place, inner, asserts_content)
    writer = _Writer(_simplify(schema, schema), {**options, **own}, prefix)
    expression = writer.value(writer.root, "")
    if not expression:
        raise GrammarError("the schema describes no JSON")
    return expression, writer.rules


def _check_subschema(place: str, schema: Mapping[str, Any], asserts_content: bool) -> None:
    """Refuse keywords that llguidance takes although texts can then break them."""
    for wanted, names in _FORMS.items():
        for name in names:
            if name in schema and not _has_form(schema[name], wanted):
                raise GrammarError(
                    f"the schema's {name} at {place}/{name} must be {wanted},"
                    f" got {schema[name]!r:.60}"
                )
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    listed_only = schema.get("additionalProperties") is False and "patternProperties" not in schema
    counted = isinstance(least, int) and isinstance(required, list) and not listed_only
    if counted and least > len(required) + 1:
        raise GrammarError(
            f"the schema's minProperties {least} at {place}/minProperties is not supported: a key"
            " may be repeated. List the keys in properties and required"
        )
    for name in ("enum", "const"):
        if _CONTROL.search(json.dumps(schema.get(name), ensure_ascii=False, default=float)):
            raise GrammarError(
                f"the schema's {name} at {place}/{name} is not supported: a control character"
            )
    for name in ("contentMediaType", "contentEncoding") if asserts_content else ():
        if name in schema:
            raise GrammarError(
                f"the schema's {name} at {place}/{name} is not supported. Remove it, or $schema:"
                " since 2019-09 it is a mere annotation"
            )


def _has_form(value: Any, wanted: str) -> bool:
    """Return whether a keyword's value has a form of `_FORMS`."""
    kind: Any = str if wanted.endswith("texts") else Mapping | bool
    lists = isinstance(value, list) and (
        wanted == "a list" or all(isinstance(inner, kind) for inner in value)
    )
    if wanted == "a mapping of schemas":
        return isinstance(value, Mapping) and all(isinstance(v, kind) for v in value.values())
    if wanted == "a whole number":
        return is_number(value) and 0 <= value < 2**63 and float(value).is_integer()
    single = not wanted.startswith("a list") and isinstance(value, kind)
    return single or ("list" in wanted and lists)


def _simplify(schema: Any, root: Any) -> Any:
    """Return a schema without keywords that allow everything, and with key patterns in place."""
    if isinstance(schema, list):
        return [_simplify(inner, root) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: _simplify(named, root) for name, named in value.items()}
        else:
            made[key] = value if key in _VALUES else _simplify(value, root)
    most: Any = made.get("maxItems")
    if made.get("uniqueItems") is False or (is_number(most) and most <= 1):
        made.pop("uniqueItems", None)
    if isinstance(made.get("format"), str) and made["format"] not in FORMATS:
        del made["format"]
    if "propertyNames" in made:
        _place_names(made, root)
    return made


def _place_names(schema: dict[str, Any], root: Any) -> None:
    """Write a schema's propertyNames as an equivalent properties or patternProperties."""
    names = schema["propertyNames"]
    names = _follow(names, root)
    if names is True or (isinstance(names, Mapping) and _only(names, {"type"}, "string")):
        del schema["propertyNames"]
        return
    if not isinstance(names, Mapping) or schema.keys() & {"properties", "patternProperties"}:
        return  # llguidance refuses propertyNames by name
    value = schema.get("additionalProperties", True)
    if _only(names, {"type", "enum"}, "string") or _only(names, {"type", "const"}, "string"):
        listed = names.get("enum", [names.get("const")])
        schema["properties"] = {name: value for name in listed if isinstance(name, str)}
    elif _only(names, {"type", "pattern"}, "string"):
        schema["patternProperties"] = {names["pattern"]: value}
    elif _only(names, {"type", "minLength", "maxLength"}, "string"):
        low, high = names.get("minLength", 0), names.get("maxLength", "")
        schema["patternProperties"] = {f"^(.|\\n){{{low},{high}}}$": value}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _only(schema: Mapping[str, Any], keywords: set[str], type_name: str) -> bool:
    """Return whether a schema has no other keywords, and this type or none."""
    return schema.keys() - _ANNOTATIONS <= keywords and schema.get("type", type_name) == type_name


def _follow(schema: Any, root: Any) -> Any:
    """Return what a schema that is a mere reference within its document stands for."""
    for _ in range(20):
        if not isinstance(schema, Mapping) or schema.keys() - _ANNOTATIONS != {"$ref"}:
            break
        schema = _at_pointer(root, schema["$ref"])
    return schema


def _at_pointer(root: Any, pointer: Any) -> Any:
    """Return the part of a document at a JSON pointer, None if there is none."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    if pointer[1:2] not in ("", "/"):
        return None
    for part in unquote(pointer[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        elif isinstance(root, Mapping) and name in root:
            root = root[name]
        else:
            return None
    return root


class _Writer:
    """Writes a schema as rules of Lark, from `value` down.

    Attributes:
        root: The whole schema, simplified.
        rules: The rules so far.
    """

    def __init__(self, root: Mapping[str, Any], options: Mapping[str, Any], prefix: str) -> None:
        self.root = root
        self._options, self._prefix = options, prefix
        self._bodies: dict[str, str] = {}  # of rules, by their names
        self._names: dict[Any, str] = {}  # of rules that are used again
        space = options.get("whitespace_pattern", "") if options["whitespace_flexible"] else ""
        self._space = f"({_terminal(space)})? " if space else ""
        comma, colon = options.get("item_separator", ","), options.get("key_separator", ":")
        self._comma = f"{self._space}{_terminal(comma)} {self._space}"
        self._colon = f"{self._space}{_terminal(colon)} {self._space}"

    @property
    def rules(self) -> list[str]:
        return [f"{name}: {body}" for name, body in self._bodies.items()]

    def value(self, schema: Any, place: str) -> str:
        """Return an expression for the values of a schema, "" if there are none."""
        if schema is False:
            return ""
        if not any(map(_lacks, self._parts(schema))):
            return self._leaf(schema)
        keywords = schema.keys() - _ANNOTATIONS
        pointer = schema.get("$ref")
        target = _at_pointer(self.root, pointer)
        if keywords == {"$ref"} and target is not None:
            return self._share_rule(pointer, self.value, target, pointer[1:])
        for name in keywords & {"const", "enum"}:
            values = _constants(schema)
            if keywords <= {name, "type"} and values:
                return _either(map(self._constant, values))
        for name in keywords & {"anyOf", "allOf"}:
            parts = [(inner, f"{place}/{name}/{n}") for n, inner in enumerate(schema[name])]
            if len(keywords) == 1 and (name == "anyOf" or len(parts) == 1):
                return _either(filter(None, (self.value(*part) for part in parts)))
        types = schema.get("type", [name for name in _OF_TYPE if name != "integer"])
        types = [types] if isinstance(types, str) else types
        if keywords <= {"type"}.union(*_OF_TYPE.values()) and {*types} <= _OF_TYPE.keys():
            branches = [self._of_type(name, schema, place) for name in types]
            if None not in branches:
                return _either(filter(None, branches))
        return self._refuse(schema, place)

    def _of_type(self, name: str, schema: Mapping[str, Any], place: str) -> str | None:
        """Return an expression for the values of one type, "" if there are none; None: no form."""
        part = {key: value for key, value in schema.items() if key in _OF_TYPE[name]}
        part["type"] = name
        if not any(map(_lacks, self._parts(part))):
            return self._leaf(part)
        if name == "array":
            return self._set(part) if part.get("uniqueItems") else self._array(part, place)
        if name == "object":
            return self._object(part, place)
        return self._string(part) if name == "string" else self._number(part)

    def _number(self, schema: Mapping[str, Any]) -> str | None:
        if "multipleOf" in schema:
            return None
        plus, minus = number_terminals(schema, schema["type"] == "integer")
        names = [
            f"{sign}{self._new(body, terminal=True)}"
            for sign, body in (("", plus), ('"-" ', minus))
            if body
        ]
        return self._new(" | ".join(names), terminal=True) if names else ""

    def _string(self, schema: Mapping[str, Any]) -> str | None:
        """Return strings for a pattern with look-around at its beginning only."""
        split = _split_look_around(schema["pattern"])
        if split is None or schema.get("format", "email") != "email":
            return None
        rest, looks = split
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        parts = [_terminal(rest), f"/(?s:.{{{low},{high}}})/"]
        parts += [
            _terminal(inner) if positive else f"~{_terminal(inner)}" for positive, inner in looks
        ]
        parts += [_terminal(_EMAIL)] if "format" in schema else []
        return self._new(
            f'"\\"" {self._new(" & ".join(parts), terminal=True)} "\\""', terminal=True
        )

    def _array(self, schema: Mapping[str, Any], place: str) -> str | None:
        first, more = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(more, list):
            first, more = more, schema.get("additionalItems", True)
        elif first and "2020-12" not in str(self.root.get("$schema", "2020-12")):
            return None
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        values = [self.value(inner, f"{place}/prefixItems/{n}") for n, inner in enumerate(first)]
        rest = self.value(more, f"{place}/items")
        if not rest:
            high = min(len(values), len(values) if high is None else high)
        if "" in values:
            return None
        if high is not None and low > high:
            return ""
        return f'"[" {self._space}{self._items(values, rest, low, high)} {self._space}"]"'

    def _items(self, values: list[str], rest: str, low: int, high: int | None) -> str:
        """Return `low` to `high` values with commas between them: the given ones, then others."""
        given, comma = len(values), self._comma
        rule = ""
        if rest and (high is None or high > given):
            first = max(given, 1)
            rule = _repeated(f"{comma}{rest}", low - first, None if high is None else high - first)
            rule = rule if given else f"({rest} {rule})" + ("" if low else "?")
        for at in reversed(range(given if high is None else min(given, high))):
            rule = f"{comma if at else ''}{values[at]} {rule}"
            rule = rule if at < low else f"({rule})?"
        return rule

    def _set(self, schema: Mapping[str, Any]) -> str | None:
        """Return arrays of different values of a short list, with a rule for each set of them."""
        values = _constants(_follow(schema.get("items"), self.root))
        low, high = schema.get("minItems", 0), schema.get("maxItems", len(values))
        if (
            not values
            or len(values) > _MAX_SET
            or schema.keys() & {"prefixItems", "additionalItems"}
        ):
            return None
        spelled, mark = list(map(self._constant, values)), object()

        def after(taken: int) -> str:
            """Return what may follow the values of a set, which is a number in binary."""
            count = taken.bit_count()
            branches = ['""'] if count >= low else []
            for n, text in enumerate(spelled if count < high else []):
                more = taken | 1 << n
                if more != taken and (rest := self._share_rule((mark, more), after, more)):
                    branches.append(f"{self._comma if count else ''}{text} {rest}")
            return _either(branches)

        inner = after(0)
        return inner and f'"[" {self._space}{inner} {self._space}"]"'

    def _object(self, schema: Mapping[str, Any], place: str) -> str | None:
        """Return objects: the listed keys in their order, then others."""
        if "patternProperties" in schema:
            return None
        more, listed = schema.get("additionalProperties", True), schema.get("properties", {})
        required = schema.get("required", [])
        listed = {**listed, **{name: more for name in required if name not in listed}}
        low, high = schema.get("minProperties", 0), schema.get("maxProperties")
        if len(listed) > _MAX_COUNTED and high is not None:
            return None
        items, mark = [], object()
        for name, inner in listed.items():
            value = self.value(inner, f"{place}/properties/{name}")
            if not value and name in required:
                return ""
            if value:
                items.append((f"{_literal(name)} {self._colon}{value}", name in required))
        other = self.value(more, f"{place}/additionalProperties")
        if other:
            taken = " | ".join(map(_literal, listed))
            key = self._new(f"/{_KEY}/" + (f" & ~({taken})" if taken else ""), terminal=True)
            other = f"{key} {self._colon}{other}"

        def after(at: int, count: int) -> str:
            """Return what may follow `count` keys, from a listed one on."""
            comma, left = self._comma if count else "", None if high is None else high - count
            if at == len(items) and not other:
                return '""' if count >= low else ""
            if at == len(items) and count:
                return _repeated(f"{comma}{other}", low - count, left)
            branches = []
            text, is_required = (other, low > 0) if at == len(items) else items[at]
            if left != 0 and (more := rest(min(at + 1, len(items)), count + 1)):
                branches.append(f"{comma}{text} {more}")
            if not is_required and (more := '""' if at == len(items) else rest(at + 1, count)):
                branches.append(more)
            return _either(branches)

        def rest(at: int, count: int) -> str:
            count = min(count, max(low, 1)) if high is None else count
            return self._share_rule((mark, at, count), after, at, count)

        for at in range(len(items) - 50, 0, -50):  # so that the recursion is not deep
            rest(at, 0), rest(at, 1)
        inner = rest(0, 0)
        return inner and f'"{{" {self._space}{inner} {self._space}"}}"'

    def _constant(self, value: Any) -> str:
        """Return an expression for one value of JSON."""
        if is_number(value):
            return _terminal(spell_number(value))
        if isinstance(value, Mapping):
            pairs = [f"{_literal(k)} {self._colon}{self._constant(v)}" for k, v in value.items()]
            inner, (begin, end) = pairs, "{}"
        elif isinstance(value, list):
            inner, (begin, end) = list(map(self._constant, value)), "[]"
        else:
            return _literal(value)
        items = self._items(inner, "", len(inner), len(inner))
        return f'"{begin}" {self._space}{items} {self._space}"{end}"'

    def _leaf(self, schema: Any) -> str:
        """Return an expression for a schema that llguidance reads."""
        if schema is self.root:
            return f"%json {json.dumps({**schema, 'x-guidance': self._options}, default=float)}"
        pointers = [part["$ref"] for part in self._parts(schema) if "$ref" in part]
        shared = ("$schema", "$defs", "definitions") if pointers else ("$schema",)
        made = {name: self.root[name] for name in shared if name in self.root}
        made |= {} if schema is True else schema
        for pointer in pointers:
            if not str(pointer).startswith(("#/$defs/", "#/definitions/")):
                raise GrammarError(
                    f"the schema's $ref {pointer!r:.60} is not supported beside what this schema"
                    " has: refer to $defs"
                )
        text = json.dumps({**made, "x-guidance": self._options}, default=float)
        return self._share_rule(text, f"%json {text}".__str__)

    def _refuse(self, schema: Mapping[str, Any], place: str) -> str:
        """Leave a schema to llguidance, which names keywords that it lacks; but refuse numbers."""
        for part in self._parts(schema):
            for number in _numbers(part):
                if is_inexact(number, as_bound=True):
                    names = ", ".join(sorted(schema.keys() - _ANNOTATIONS))
                    raise GrammarError(
                        f"the schema's number {number} is not supported at {place or '/'}, beside"
                        f" {names}: it is too precise. Use it in plain properties, items or anyOf"
                    )
        return self._leaf(schema)

    def _parts(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield a schema, then all schemas within it and all that these refer to."""
        seen, new = set[str](), [schema]
        while new:
            schema = new.pop()
            if isinstance(schema, Mapping):
                schema = {k: v for k, v in schema.items() if k not in ("$defs", "definitions")}
            for _, part in subschemas(schema):
                yield part
                pointer = part.get("$ref")
                if isinstance(pointer, str) and pointer not in seen:
                    seen.add(pointer)
                    target = _at_pointer(self.root, pointer)
                    if target is None:  # by an $id or $anchor: it may be any of them
                        yield from (inner for _, inner in subschemas(self.root))
                    new.append(target)

    def _new(self, body: str, *, terminal: bool = False) -> str:
        name = f"{self._prefix}_{len(self._bodies)}"
        name = name.upper() if terminal else name
        self._bodies[name] = body
        return name

    def _share_rule(self, key: Any, make: Callable[..., str], *arguments: Any) -> str:
        """Return the name of a rule that is made once, "" if it has no texts."""
        if key not in self._names:
            self._names[key] = name = self._new("")
            self._bodies[name] = body = make(*arguments)
            if not body:
                del self._bodies[name]
                self._names[key] = ""
        return self._names[key]


def subschemas(value: Any, place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the schemas within a schema, itself first, with their JSON pointers."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from subschemas(inner, f"{place}/{index}")
    if not isinstance(value, Mapping):
        return
    yield place, value
    for key, inner in value.items():
        if key in _BY_NAME and isinstance(inner, Mapping):
            for name, named in inner.items():
                yield from subschemas(named, f"{place}/{key}/{name}")
        elif key not in _VALUES:
            yield from subschemas(inner, f"{place}/{key}")


def keyword_place(schema: Any, message: str) -> str:
    """Return a message about a JSON schema with the place of the keyword that it names."""
    for name in re.findall(r'"([^"]+)"|\'(\w+)\'|format: (\S+)|type: (\S+)', message):
        word = next(filter(None, name))
        for place, inner in subschemas(schema):
            for key, value in inner.items():
                if key == word or value == word:
                    return f"{message} at {place}/{key}"
    return message


def _lacks(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema's own keywords have something that llguidance lacks."""
    numbers = [schema[name] for name in BOUNDS if name in schema]
    if any(is_inexact(n, as_bound=n in numbers) for n in _numbers(schema)):
        return True
    counts = not schema.keys().isdisjoint({"minProperties", "maxProperties"})
    optional = set(schema.get("properties", ())) - set(schema.get("required", ()))
    pattern = schema.get("pattern")
    look_around = isinstance(pattern, str) and any(word in pattern for word in _LOOK_AROUND)
    return schema.get("uniqueItems") is True or (counts and bool(optional)) or look_around


def _numbers(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the numbers that a schema compares values with."""
    new = [schema[name] for name in (*BOUNDS, "multipleOf", "const", "enum") if name in schema]
    while new:
        value = new.pop()
        if is_number(value):
            yield value
        new += value.values() if isinstance(value, Mapping) else ()
        new += value if isinstance(value, list) else ()


def _constants(schema: Any) -> list[Any]:
    """Return the different values of a schema that lists them, [] for another schema."""
    if not isinstance(schema, Mapping):
        return []
    keywords, types = schema.keys() - _ANNOTATIONS, schema.get("type", [*_TYPES])
    if keywords == {"type"} and types == "boolean":
        return [False, True]
    if len(keywords - {"type"}) != 1 or not keywords & {"const", "enum"}:
        return []
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    types = [types] if isinstance(types, str) else types
    kept = {_identity(v): v for v in values if any(_TYPES[t](v) for t in types if t in _TYPES)}
    return list(kept.values())


_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, Mapping),
    "number": is_number,
    "integer": lambda value: is_number(value) and to_decimal(value) % 1 == 0,
}


def _identity(value: Any) -> Any:
    """Return a key that equal values of JSON share."""
    if is_number(value):
        return "number", to_decimal(value)
    if isinstance(value, list):
        return tuple(map(_identity, value))
    if isinstance(value, Mapping):
        return frozenset((name, _identity(inner)) for name, inner in value.items())
    return type(value), value


def _split_look_around(pattern: str) -> tuple[str, list[tuple[bool, str]]] | None:
    """Return the regex of whole texts behind a pattern's look-ahead, and what must be or not be.

    None: the pattern looks around elsewhere, or its texts have characters that JSON escapes.
    """
    looks, at = [], 1
    while pattern.startswith(("(?=", "(?!"), at):
        ends = [n for n, token, depth in _tokens(pattern[at:]) if token == ")" and depth == 0]
        if not ends:
            return None
        looks.append((pattern[at + 2] == "=", pattern[at + 3 : at + ends[0]]))
        at += ends[0] + 1
    texts = [inner.removeprefix("^") for _, inner in looks] + [pattern[at:]]
    anchored = any(
        token in ("^", "$", "|") and depth == 0 and 0 <= n < len(text) - 1
        for text in texts
        for n, token, depth in _tokens(text)
    )
    if not pattern.startswith("^") or anchored or any(w in t for w in _LOOK_AROUND for t in texts):
        return None
    try:
        automaton = compile_regex("(?s)" + _to_whole(texts[-1]))
    except GrammarError:
        return None
    escaped = [*b'"\\\x7f', *range(32)]
    if (automaton.next_SN[:, escaped] != DEAD).any():
        return None
    wholes = list(map(_to_whole, texts))
    return wholes[-1], [(look[0], whole) for look, whole in zip(looks, wholes[:-1], strict=True)]


def _to_whole(pattern: str) -> str:
    """Return a regex that matches whole texts for one that matches their beginning, in ASCII."""
    ascii_only = {r"\d": "0-9", r"\w": "a-zA-Z0-9_"}
    made, in_class = "", False
    for _, token, depth in _tokens(pattern):
        in_class = depth < 0
        known = ascii_only.get(token, "")
        made += (known if in_class else f"[{known}]") if known else token
    ends = pattern.endswith("$") and not pattern.endswith(r"\$")
    return f"({made[:-1]})" if ends else f"({made})(.|\\n)*"


def _tokens(pattern: str) -> Iterator[tuple[int, str, int]]:
    """Yield the characters and escapes of a regex, with their places and depths in groups.

    A closing parenthesis has the depth outside; within a class the depth is -1.
    """
    depth, in_class = 0, False
    for match in re.finditer(r"\\.|[^\\]", pattern, re.DOTALL):
        token = match[0]
        if in_class:
            in_class = token != "]"
        else:
            in_class = token == "["
            depth += (token == "(") - (token == ")")
        yield match.start(), token, -1 if in_class else depth


def _literal(value: Any) -> str:
    """Return a Lark string of a value's JSON."""
    return json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)


def _terminal(regex: str) -> str:
    """Return a regex as Lark's terminal."""
    inner = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL)
    return "/" + inner.replace("\n", r"\n") + "/"


def _either(expressions: Iterable[str]) -> str:
    """Return alternatives, "" for none."""
    branches = list(expressions)
    return f"({' | '.join(branches)})" if branches else ""


def _repeated(expression: str, low: int, high: int | None) -> str:
    """Return an expression `low` to `high` times."""
    if high == 0:
        return '""'
    return f"({expression}){{{max(0, low)},{'' if high is None else high}}}"
