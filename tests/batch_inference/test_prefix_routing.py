"""A request is routed to a replica that has seen the longest beginning of it and is not busy."""

import json
import random
from collections.abc import Sequence
from typing import Any

from jaxllm.batch_inference.prefix_routing import BLOCK, SeenBeginnings, digest_beginnings

IDLE = {"a": 0, "b": 0, "c": 0}


def digest(key: bytes = b"", **body: Any) -> list[bytes]:
    return digest_beginnings(key, json.dumps(body).encode())


def say(role: str, n: int) -> dict[str, str]:
    return {"role": role, "content": f"{n}" * BLOCK}


def test_next_turn_begins_with_last_ones_digests() -> None:
    """The fields may come in any order, and others do not matter."""
    first = [say("user", 1)]
    short = digest(messages=first, temperature=0.5)
    long = digest(seed=3, messages=[*first, say("assistant", 2), say("user", 3)])
    assert len(short) == 1 and len(long) == 3
    assert long[:1] == short and len(set(long)) == len(long)


def test_each_field_before_difference_counts() -> None:
    """What the model reads first decides; a difference ends what is common."""
    tools: list[Any] = [{"type": "function", "function": {"name": "f" * BLOCK}}]
    texts = ["x" * 3 * BLOCK, "x" * 2 * BLOCK + "y" * BLOCK]
    for field, before in [
        ("messages", {"tools": tools}), ("messages", {"system": "s" * BLOCK}),
        ("input", {"instructions": "s" * BLOCK}), ("prompt", {}),
    ]:  # fmt: skip
        one, other = (digest(**{field: [say("user", 1), text]}, **before) for text in texts)
        same = [a == b for a, b in zip(one, other, strict=True)]
        assert same == sorted(same, reverse=True) and 2 < sum(same) < len(same)
        if before:
            changed = {name: [value, 1] for name, value in before.items()}
            assert digest(**{field: texts}, **changed)[0] != digest(**{field: texts}, **before)[0]
    ids = list(range(1000))
    assert digest(prompt=ids)[:5] == digest(prompt=[*ids, 7])[:5]


def test_keys_share_no_digest() -> None:
    """A key and a text are not confused either."""
    messages = [say("user", 1)] * 3
    assert not {*digest(b"k", messages=messages)} & {*digest(b"", messages=messages)}
    assert not {*digest(b'"', prompt="x" * 999)} & {*digest(b"", prompt="x" * 999)}


def test_other_bodies_have_no_digests() -> None:
    for body in (
        b"",
        b"{",
        b"[1]",
        b"\xff",
        b"{}",
        b'{"prompt": "short"}',
        b'{"seed": %d}' % 9**99,
    ):
        assert digest_beginnings(b"", body) == []


def test_longest_beginning_is_preferred() -> None:
    seen = SeenBeginnings[str]()
    seen.add([b"1", b"2"], "a")
    seen.add([b"1", b"2", b"3"], "b")
    assert seen.rank([b"1", b"2", b"3", b"4"], IDLE, 1) == [["b"], ["a", "c"]]
    assert seen.rank([b"1", b"2", b"5"], IDLE, 1) == [["a", "b"], ["c"]]
    assert seen.rank([b"5", b"2"][:1], IDLE, 1) == [["a", "b", "c"]]
    assert seen.rank([], IDLE, 1) == [["a", "b", "c"]]


def test_busy_replica_is_not_preferred() -> None:
    """Beyond the margin above the least busy one, the next longest beginning decides."""
    seen = SeenBeginnings[str]()
    seen.add([b"1"], "b")
    seen.add([b"1", b"2"], "a")
    digests = [b"1", b"2"]
    assert seen.rank(digests, {"a": 7, "b": 6, "c": 5}, 2)[0] == ["a"]
    assert seen.rank(digests, {"a": 8, "b": 6, "c": 5}, 2)[0] == ["b"]
    assert seen.rank(digests, {"a": 8, "b": 8, "c": 5}, 2) == [["a", "b", "c"]]
    assert seen.rank(digests, {"a": 1, "b": 0}, 0)[0] == ["b"]


def test_dead_replica_is_not_chosen() -> None:
    seen = SeenBeginnings[str]()
    seen.add([b"1"], "b")
    seen.add([b"1", b"2"], "dead")
    assert seen.rank([b"1", b"2"], IDLE, 1) == [["b"], ["a", "c"]]


def test_table_forgets_long_and_old_beginnings_first() -> None:
    seen = SeenBeginnings[str](limit=4)

    def known(digests: Sequence[bytes]) -> list[bool]:
        return [len(seen.rank([digest], IDLE, 1)) == 2 for digest in digests]

    seen.add([b"1", b"2", b"3"], "a")
    seen.add([b"1", b"4", b"5"], "b")
    assert known([b"1", b"2", b"3", b"4", b"5"]) == [True, True, False, True, True]
    seen.add([b"%d" % n for n in range(10, 20)], "c")
    assert known([b"1", b"10", b"13", b"14"]) == [False, True, True, False]


def test_rank_equals_brute_force_over_texts() -> None:
    """Digests find what a comparison of all texts with all earlier ones finds."""
    rng = random.Random(0)
    seen, texts = SeenBeginnings[str](), dict[str, list[str]]()
    routed = 0
    for _ in range(300):
        text = "".join(rng.choice("xy") * BLOCK for _ in range(rng.randrange(1, 7)))
        lengths = {name: rng.randrange(4) for name in "abc"}
        most = min(lengths.values()) + 1
        common = {
            name: max((_common_blocks(text, old) for old in texts.get(name, ())), default=0)
            for name in lengths
            if lengths[name] <= most
        }
        longest = max(common.values())
        expected = [name for name in lengths if longest and common.get(name) == longest]
        digests = digest(prompt=text)
        ranks = seen.rank(digests, lengths, 1)
        assert ranks[0] == (expected or [*"abc"]) and sorted(x for rank in ranks for x in rank) == [
            *"abc"
        ]
        routed += bool(expected)
        chosen = rng.choice("abc")
        seen.add(digests, chosen)
        texts.setdefault(chosen, []).append(text)
    assert routed > 200


def _common_blocks(one: str, other: str) -> int:
    """Return the number of blocks of the JSON texts that are the same from the beginning."""
    blocks = [
        [text[i : i + BLOCK] for i in range(0, len(text) // BLOCK * BLOCK, BLOCK)]
        for text in (json.dumps(one), json.dumps(other))
    ]
    same = [a == b for a, b in zip(*blocks, strict=False)]
    return same.index(False) if False in same else len(same)
