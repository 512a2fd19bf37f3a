"""Seeded mutations of files: bits, byte ranges, JSON values and node types."""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from jaxllm.cache.files import digest
from jaxllm.weights.safetensors import open_tensors

# Placeholders in a tree for texts that json.dumps cannot write.
RAW = {
    "@digits": "9" * 5000, "@deep": "[" * 100_000 + "]" * 100_000, "@objects": '{"a":' * 5000,
    "@nan": "NaN", "@infinity": "-Infinity", "@huge": "1e999", "@surrogate": '"\\ud800"',
}  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, -(2**31), 2**31, 2**63, 2**64, 10**12, 10**30, 0.5, -0.0, 1e308,
    1e-320, "", "x", "1", "\0", "\u2581", "../../etc/passwd", "/dev/zero", "(.+)+x", "(", "\\1",
    "a" * 100_000, [], {}, [[]], [None], {"": None}, [1] * 10_000, {"type": "Sequence"},
    "__class__", "{{ ''.join }}", "float64", "int8", "__proto__", *RAW,
)  # fmt: skip


def mutate(rng: Random, directory: Path, names: tuple[str, ...]) -> None:
    """Mutate one to three times: a file's content, or what kind of node its name is."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = directory / rng.choice(names)
        if not path.is_file() or path.is_symlink():
            continue
        if rng.random() < 0.04:
            rng.choice(NODES)(path)
            continue
        content = path.read_bytes()
        structured = _STRUCTURED.get(path.suffix)
        if structured and rng.random() < 0.7:
            path.write_bytes(structured(rng, content))
        else:
            path.write_bytes(rng.choice(BYTES)(rng, content))


# Bytes.


def flip(rng: Random, content: bytes) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        changed[_at(rng, changed)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: Random, content: bytes) -> bytes:
    return content[: rng.choice((0, 1, 8, 9, len(content) - 1, rng.randrange(len(content) + 1)))]


def splice(rng: Random, content: bytes) -> bytes:
    """Copy a byte range to another place, by insertion or overwriting."""
    start, to = rng.randrange(len(content) + 1), rng.randrange(len(content) + 1)
    piece = content[start : start + rng.choice((1, 8, 100, 10_000))]
    return content[:to] + piece + content[to + rng.choice((0, len(piece))) :]


def number(rng: Random, content: bytes) -> bytes:
    """Overwrite eight bytes with an unusual integer."""
    value = rng.choice((0, 1, 8, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, len(content)))
    changed, at = bytearray(content.ljust(8, b"\0")), _at(rng, content)
    changed[at : at + 8] = struct.pack("<Q", value)
    return bytes(changed)


def fill(rng: Random, content: bytes) -> bytes:
    start, size = rng.randrange(len(content) + 1), rng.choice((1, 4, 64, 4096))
    return content[:start] + rng.choice((b"\0", b"\xff", b"\n", b" ")) * size + content[start:]


BYTES: tuple[Callable[[Random, bytes], bytes], ...] = (flip, flip, cut, splice, number, fill)


def _at(rng: Random, content: bytes | bytearray) -> int:
    """Return a random offset, biased to the start, where headers are."""
    return rng.randrange(min(len(content), rng.choice((16, 512, 1 << 40))) or 1)


# JSON.


def json_value(rng: Random, content: bytes) -> bytes:
    """Change one value, name or object."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):  # an earlier mutation broke the JSON
        return flip(rng, content)
    return _dumped(rng, _changed(rng, tree))


def json_lines(rng: Random, content: bytes) -> bytes:
    """Change, delete, repeat or cut one line."""
    lines = content.splitlines(keepends=True) or [b"\n"]
    at = rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            del lines[at]
        case 1:
            lines.insert(rng.randrange(len(lines) + 1), lines[at])
        case 2:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        case _:
            lines[at] = json_value(rng, lines[at]) + b"\n"
    return b"".join(lines)


def header_value(rng: Random, content: bytes) -> bytes:
    """Change a value in a safetensors header and update the header's length."""
    (length,) = struct.unpack("<Q", content[:8].ljust(8, b"\0"))
    try:
        header = json.loads(content[8 : 8 + length])
        metadata = header.get("__metadata__", {})
        if "header" in metadata and rng.random() < 0.7:  # the nested header
            inner = _changed(rng, json.loads(metadata["header"]))
            metadata["header"] = _dumped(rng, inner).decode()
            text = json.dumps(header).encode()
        else:
            text = _dumped(rng, _changed(rng, header))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return flip(rng, content)
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


_STRUCTURED: dict[str, Callable[[Random, bytes], bytes]] = {
    ".json": json_value, ".jsonl": json_lines, ".safetensors": header_value,
}  # fmt: skip


def _changed(rng: Random, tree: Any) -> Any:
    places = list(_places(tree))
    if not places:
        return rng.choice(ODD)
    holder, key = rng.choice(places)
    other_holder, other_key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("x", "", "type", "format", str(key) + "s"))] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder[key:key] = [holder[key]] * rng.choice((1, 100))
        case 3:
            holder[key] = json.loads(json.dumps(other_holder[other_key]))
        case 4 if type(holder[key]) in (int, float):
            holder[key] = holder[key] * rng.choice((-1, 2, 1000)) + rng.choice((-1, 0, 1))
        case _:
            holder[key] = rng.choice(ODD)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key), up to 40 per container."""
    if not isinstance(tree, dict | list):
        return
    keys = list(tree)[:40] if isinstance(tree, dict) else range(min(len(tree), 40))
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _dumped(rng: Random, tree: Any) -> bytes:
    text = json.dumps(tree)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    if rng.random() < 0.03 and text.startswith("{") and len(text) > 2:
        text = text[:-1] + "," + text[1:]  # repeat all names
    return text.encode()


# Node types.


def _replaced_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return a function that removes a file and makes another node in its place."""

    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def _as_link_out(path: Path) -> None:
    path.rename(path.parent.parent / f"outside {path.parent.name} {path.name}")
    path.symlink_to(path.parent.parent / f"outside {path.parent.name} {path.name}")


NODES: tuple[Callable[[Path], object], ...] = (
    Path.unlink, _replaced_by(Path.mkdir), _replaced_by(os.mkfifo), _as_link_out,
    _replaced_by(lambda path: path.symlink_to(path.name)),
    _replaced_by(lambda path: path.symlink_to("/dev/zero")),
)  # fmt: skip


# Digests, updated as an attacker would.


def redigest_cache(directory: Path) -> None:
    path = directory / "story.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    inner = json.loads(header["__metadata__"]["header"])
    inner["digest"] = digest(inner, {n: t.read() for n, t in open_tensors(path).items()})
    header["__metadata__"]["header"] = json.dumps(inner)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def redigest_export(directory: Path) -> None:
    manifest = json.loads((directory / "manifest.json").read_bytes())
    for entry in (manifest["weights"], *manifest["steps"].values()):
        entry["sha256"] = hashlib.sha256((directory / entry["file"]).read_bytes()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest))
