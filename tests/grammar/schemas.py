"""Random JSON schemas of what a grammar supports."""

import random
from typing import Any


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema of bounded texts: objects and arrays up to `depth` levels."""
    kinds = ["boolean", "integer", "number", "string", "enum", "const", "null"]
    kind = rng.choice([*kinds, "object", "array", "anyOf"] if depth else kinds)
    if kind == "object":
        names = rng.sample(["a", "name", "x y", "n", "ok"], rng.randint(0, 3))
        required = rng.sample(names, rng.randint(0, len(names)))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        count = {"maxProperties": len(required) + 1} if rng.random() < 0.3 else {}
        return {
            **count,
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    if kind == "array":
        low = rng.randint(0, 1)
        items = random_schema(rng, depth - 1)
        if rng.random() < 0.3:
            return {"type": "array", "items": {"enum": ["a", 2, None]}, "uniqueItems": True}
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    if kind == "string":
        more = rng.choice([{"maxLength": 6}, {"pattern": "^[a-z]{1,4}$"}, {"format": "date"}])
        return {"type": "string", **more}
    if kind in ("integer", "number"):
        high = rng.choice([rng.randint(4, 90), 2**63 - 1])
        return {"type": kind, "minimum": rng.randint(-3, 3), "maximum": high}
    if kind == "enum":
        return {"enum": rng.sample(["red", 1, None, "blü", 2.5, True], 3)}
    return {"const": rng.choice(["k", 7, 2**53 + 1])} if kind == "const" else {"type": kind}
