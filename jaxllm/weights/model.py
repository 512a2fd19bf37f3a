"""The interface of a model: a pure function of its parameters, and where their arrays are.

The cache room asks it too, so it is in a room below.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.config.model import ModelConfig
from jaxllm.weights.lazy_gather import load_weight
from jaxllm.weights.paths import Params, Placement, map_leaves
from jaxllm.weights.precision import Precision


class Model:
    """A model, hashable by value, with a Flax module's `apply` and `clone`.

    The answers here are those of a model on one device, which every module of `models` is.
    `sharding.ShardedModel` has its own. `sharding.sharded_model` has more functions of any model,
    for training and loading.
    """

    config: ModelConfig
    precision: Precision
    if TYPE_CHECKING:
        apply: Callable[..., Any]
        clone: Callable[..., Any]

    @property
    def is_sharded(self) -> bool:
        return self.cache_sharding is not None

    @property
    def cache_sharding(self) -> Placement | None:
        """The sharding of a cache's array, by its path; scalars are replicated. None: unchanged."""
        return None

    @property
    def cache_writer(self) -> Callable[..., Any] | None:
        """Writes new entries into a cache's tail; None: `ops.slot_update.write_at_cursor`.

        It is compared by value.
        """
        return None

    @property
    def joined_layers(self) -> tuple[tuple[int | None, ...], ...]:
        """The layers whose heads each array of a cache's keys holds, None for an empty place.

        It is empty if each array belongs to one layer.
        """
        return ()

    def decode_loop(self, rows: int) -> Any:
        """Return a loop that decodes in another order than `generation.loops.rounds`; None: none.

        It takes the arguments of `ROUNDS` without the counts and the attention mass, and returns
        what `ROUNDS` does without the mass. Tokens and random keys are the same.
        """
        return None

    def shard(self, params: Params) -> Params:
        """Shard parameters of the unsharded model."""
        return params

    def gather_lazy(self, params: Params) -> Params:
        """Return the unsharded model's parameters, each to be gathered when it is read.

        Read one after the other, they take no more memory than the largest.
        """
        return params

    def gather(self, params: Params) -> Params:
        """Gather all parameters to the host; with several processes, to the host of each."""
        return map_leaves(lambda _, weight: load_weight(weight), self.gather_lazy(params))

    def unsharded_paths(self, path: str) -> tuple[str | None, ...]:
        """Return the unsharded model's paths of the parameter at `path`.

        That is one path, or those of the layers that share its arrays, None for an empty place.
        """
        return (path,)

    def check_sites(self, read: Sequence[str] = (), edited: Sequence[str] = ()) -> None:
        """Raise ConfigError for sites (full names) that this model cannot read or edit."""

    def num_data_shards(self, rows: int) -> int:
        """Return how many devices split `rows` rows of the input."""
        return 1

    def with_sharded_logits(self) -> Any:
        """Return the model for sums over the vocabulary: no device needs all logits."""
        return self
