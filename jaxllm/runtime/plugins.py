"""What packages add to this one, by entry points in groups `jaxllm.NAME`.

commands: modules with a function of the entry's name and an EXAMPLE (`cli`). train_commands: the
same for `jaxllm train` (`cli.train`). attention_kinds: classes of attention
(`config.attention_kind`). compress_methods: rows of a recipe's table (`compress.registry`).
weight_types: modules with a `parse` and NAMES (`weights.formats`). mesh_axes: classes of models on
a mesh with that axis (`sharding.sharded_model`). overflow_policies: classes of policies for a full
cache (`generation.loops.overflow`). train_objectives: functions of an argument and the model that
return an objective (`cli.train`).
"""

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@functools.cache
def find_plugins(group: str) -> "dict[str, EntryPoint]":
    """Return the entry points of a group by name; nothing is imported."""
    from importlib.metadata import entry_points  # takes longer than a command's own imports

    return {entry.name: entry for entry in entry_points(group=f"jaxllm.{group}")}


@functools.cache
def load_plugins(group: str) -> tuple[Any, ...]:
    """Import what the entry points of a group name."""
    return tuple(entry.load() for entry in find_plugins(group).values())
