"""Byte-level BPE: its 256 symbols, and GPT-2's `vocab.json` with `merges.txt`.

Each byte is written as one printable character, so that a vocabulary of strings can hold any bytes:
printable Latin-1 characters represent themselves, the other bytes are mapped to the characters from
U+0100 on, in order (Radford et al., 2019, section 2.2, and the encoder published with it).
"""

from pathlib import Path
from typing import Any

from jaxllm.errors import CheckpointError
from jaxllm.files import path_inside, read_json, read_text

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_SYMBOL = {
    **{chr(byte): byte for byte in sorted(_PRINTABLE)},
    **{chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)},
}


def symbols_to_bytes(token: str) -> bytes:
    """Return the bytes of a token; a token with any other character is encoded as UTF-8."""
    if all(symbol in BYTE_OF_SYMBOL for symbol in token):
        return bytes(BYTE_OF_SYMBOL[symbol] for symbol in token)
    return token.encode()


def byte_level_step(*, add_prefix_space: bool = False, use_regex: bool = True) -> dict[str, Any]:
    """Return the step that maps bytes to symbols (pre-tokenizer) or back (decoder)."""
    flags = {"add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **flags}


def read_byte_level(directory: Path, *, add_prefix_space: bool) -> dict[str, Any]:
    """Read `vocab.json` and `merges.txt` from a directory as a `tokenizer.json` tree.

    Raises:
        CheckpointError: a file is malformed, or the vocabulary lacks a byte (text would be lost).
    """
    vocab, path = (
        read_json(path_inside(directory, "vocab.json")),
        path_inside(directory, "merges.txt"),
    )
    if missing := sorted(BYTE_OF_SYMBOL.keys() - vocab.keys()):
        raise CheckpointError(
            f"{directory / 'vocab.json'} lacks {len(missing)} of the 256 byte symbols of a "
            f"byte-level vocabulary, for example {missing[0]!r}"
        )
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        merge = line.split(" ")
        if len(merge) != 2:
            raise CheckpointError(f"{path}, line {number}: expected two pieces, got {line[:80]!r}")
        merges.append(merge)
    byte_level = byte_level_step(add_prefix_space=add_prefix_space)
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
