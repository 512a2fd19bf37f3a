"""Choose a replica for a request: the one that has seen the longest beginning of it.

Its prefix cache probably holds this beginning. A beginning is known by a digest of it, so that the
table of beginnings is small and holds no text.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from jaxllm.errors import JaxllmError
from jaxllm.files import parse_json

BLOCK = 128  # characters between two beginnings: about a chunk of the prefix cache, 32 tokens
MAX_BEGINNINGS = 1 << 16
# What of a request's body the model reads, in this order.
_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")
Replica = TypeVar("Replica", bound=Hashable)


def digest_beginnings(key: bytes, body: bytes) -> list[bytes]:
    """Return the digests of a request's beginnings, the shortest first.

    Args:
        key: the client's. Requests with different keys have no digest in common.
        body: JSON with OpenAI's or Anthropic's fields; anything else has no beginnings.
    """
    try:
        fields = parse_json(body, "the body", JaxllmError)
    except JaxllmError:
        return []
    if not isinstance(fields, dict):
        return []
    text = "".join(json.dumps(fields[name]) for name in _FIELDS if name in fields)
    chain = hashlib.blake2b(hashlib.sha256(key).digest(), digest_size=16)
    digests = []
    for end in range(BLOCK, len(text) + 1, BLOCK):
        chain.update(text[end - BLOCK : end].encode())
        digests.append(chain.digest())
    return digests


class SeenBeginnings(Generic[Replica]):
    """Which replicas have seen which beginnings; those that were seen longest ago give way."""

    def __init__(self, limit: int = MAX_BEGINNINGS) -> None:
        self._limit = limit
        self._replicas: OrderedDict[bytes, set[Replica]] = OrderedDict()

    def add(self, digests: Sequence[bytes], replica: Replica) -> None:
        """Note that a replica got a request with these beginnings."""
        for digest in reversed(digests):  # of one request, the longest ones give way first
            self._replicas.setdefault(digest, set()).add(replica)
            self._replicas.move_to_end(digest)
        while len(self._replicas) > self._limit:
            self._replicas.popitem(last=False)

    def rank(
        self, digests: Sequence[bytes], lengths: Mapping[Replica, int], margin: int
    ) -> list[list[Replica]]:
        """Return groups of replicas for a request with these beginnings, the best group first.

        The first group has seen its longest beginning; if nobody has seen any, all are one group.

        Args:
            lengths: the number of requests that each living replica has; not empty.
            margin: a replica with more than this above the least number is not preferred.
        """
        most = min(lengths.values()) + margin
        for digest in reversed(digests):
            seen = self._replicas.get(digest, ())
            if best := [name for name, n in lengths.items() if name in seen and n <= most]:
                return [best, [name for name in lengths if name not in best]]
        return [list(lengths)]
