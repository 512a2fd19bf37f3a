"""Kinds of attention other than full and sliding-window: classes of other packages, by name."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from jaxllm.errors import ConfigError
from jaxllm.runtime.plugins import find_plugins
from jaxllm.runtime.schema import as_schema


class AttentionKind:
    """How all layers of a model attend; a subclass, a frozen dataclass, has settings as fields.

    A package gives its subclasses in entry points of the group `jaxllm.attention_kinds`, under the
    names that are their `kind`. A subclass overrides what differs from full attention.

    Attributes:
        kind: Its name in files.
    """

    kind: str

    @classmethod
    def from_json(cls, data: Any) -> "AttentionKind":
        """Return the kind that a file describes. Raises ConfigError if there is none."""
        name = data.get("kind") if isinstance(data, Mapping) else None
        found = find_plugins("attention_kinds")
        if name not in found:
            known = ", ".join(sorted(found))
            raise ConfigError(f"attention of kind {name!r:.40} is not supported (known: {known})")
        kind: AttentionKind = as_schema(data, found[name].load(), "attention", ConfigError)
        return kind

    @property
    def shards_heads(self) -> bool:
        """Whether some of the heads can run without the others."""
        return True

    @property
    def head_params(self) -> tuple[str, ...]:
        """Names of further parameters of attention, one number for each query head."""
        return ()

    @property
    def rates(self) -> tuple[tuple[str, float], ...]:
        """Learning rates of parameters, by patterns of their paths."""
        return ()

    @property
    def runs_trees(self) -> bool:
        """Whether the new tokens can be nodes of a tree."""
        return False

    def context_length(self, trained: int) -> int:
        """Return the longest text, in tokens, of a model trained on texts of this length."""
        return trained

    @property
    def segment_length(self) -> int | None:
        """Tokens per segment, if tokens attend only within one and to a state of those before."""
        return None

    @property
    def period(self) -> int | None:
        """The smallest shift of a text that changes no result; None if there is none."""
        return None

    def with_layers(self, indices: Sequence[int]) -> Self:
        """Return the kind for a model with only these layers, in this order."""
        return self

    def complaints(self, config: Any) -> list[str]:
        """Return what is invalid for a model of this configuration (`DecoderConfig`)."""
        return []

    def state_shape(self, kv_heads: int, head_dim: int) -> Any:
        """Return the shapes of one row's state of a layer, as a pytree; None without a state."""
        return None

    def attend(
        self,
        context: Any,
        site: Any,
        q_BTNH: Any,
        parts: Sequence[Any],
        unrotated: Any,
        *,
        rope: Any,
        window: int | None,
        sink_N: Any,
        scale: float,
        cap: float | None,
    ) -> tuple[Any, Any, Any]:
        """Return the heads `[B, T, N, H]` in q's dtype, the attention mass if it is requested, and
        the new state, or None.

        parts: the cache's, then the new tokens. unrotated: `layers.Unrotated`. rope: the layer's
        rotary settings. Other arguments: see `layers.attend`.
        """
        raise NotImplementedError

    def segment_start(self, state: Any) -> Any:
        """Return the first position of each row's current segment, int32 `[B]`."""
        raise NotImplementedError

    def rewind(self, state: Any, entries: list[Any], next_B: Any, now_B: Any, rope: Any) -> Any:
        """Return the state of rows that go back to `next_B`, within their current segments.

        entries: keys, values and positions of the cache's segments in this layer. now_B: where the
        rows are.
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set."""
        raise NotImplementedError
