"""Schemas: values that violate their annotations are refused by name."""

import dataclasses
import re
from typing import Annotated, Any, Literal

import msgspec
import pytest

from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.runtime.schema import as_schema, field_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    size: Annotated[int, msgspec.Meta(ge=1, le=9)]
    kind: Literal["a", "b"] = "a"
    scale: float | None = None


@dataclasses.dataclass(frozen=True)
class Whole:
    parts: dict[str, list[Part]]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"size": 0}, "must be a whole number >= 1"),
        ({"size": 10**30}, "must be a whole number <= 9"),
        ({"size": True}, "must be a whole number"),
        ({"size": "1"}, "must be a whole number"),
        ({"size": 1, "kind": ["a"]}, "must be a string"),
        ({"size": 1, "kind": "c"}, "Invalid enum value 'c'"),
        ({"size": 1, "scale": [1]}, "must be a number or null"),
        ({}, "missing required field size"),
        ({"size": 1, "colour": 1, "taste": 2}, "unknown colour, taste"),
        (5, "must be an object"),
    ],
)
def test_as_schema_names_invalid_field(part: Any, words: str) -> None:
    """Data that violates the schema raises an error that names the field or the constraint."""
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        as_schema({"parts": {"x": [{"size": 1}, part]}}, Whole, "file.json", ConfigError)
    assert str(caught.value).startswith("file.json: ")


def test_as_schema_reports_path_and_value() -> None:
    """Valid data becomes the dataclass; errors give a field's path and, if possible, value."""
    good = as_schema({"parts": {"x": [{"size": 3, "scale": 2}]}}, Whole, "x")
    assert good == Whole({"x": [Part(size=3, scale=2.0)]})
    with pytest.raises(CheckpointError) as caught:
        as_schema([{"size": 1}, {"size": 12}], list[Part], "f")
    assert str(caught.value) == "f: [1].size must be a whole number <= 9, got 12"
    wrong = Part(size="x", kind="c", scale=1)  # type: ignore[arg-type]
    assert field_errors(wrong) == [
        "size must be a whole number, got 'x'",
        "kind must be one of a, b, got 'c'",
    ]
