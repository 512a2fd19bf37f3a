"""Target modules of a LoRA configuration, with rank and scale: by PEFT's name rules or path rules.

PEFT uses Hugging Face's module names: our paths with the prefix from the checkpoint's table.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from jaxllm import models
from jaxllm.adapters.config import ALL_LINEAR, LoraConfig, Names
from jaxllm.config import ModelConfig
from jaxllm.convert.engine import TABLES
from jaxllm.convert.layouts import Fused
from jaxllm.convert.tables import Architecture
from jaxllm.errors import ConfigError
from jaxllm.files import match_names
from jaxllm.weights.leaves.adapted import Site
from jaxllm.weights.paths import first_match, flatten

HEAD = "lm_head"
V = TypeVar("V")


class Target(NamedTuple):
    """A module that can have an adapter.

    path: parameter path of its weight; for a tied head, that of the token embedding. name: Hugging
    Face's name. site: which use of the weight the adapter changes. shape: `(O, I)`. fused: Hugging
    Face's name of the fused module that contains this one, or "".
    """

    path: str
    name: str
    site: Site
    shape: tuple[int, int]
    fused: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that rules may match."""
        return (self.name, self.fused) if self.fused else (self.name,)


class Low(NamedTuple):
    """Rank, scale and alpha of the adapter of one module."""

    target: Target
    rank: int
    scale: float
    alpha: float


def targets_of(config: ModelConfig) -> dict[str, Target]:
    """Return a model's linear layers and embeddings by module path, including a tied head."""
    row = models.family(config.model_type)
    _, table = TABLES[config.model_type].write_config(config)
    found = {}
    for path, leaf in flatten(models.param_shapes(models.build(config))):
        module = path.removesuffix(".weight")
        routes = row.router is not None and module.endswith(f".{row.router}")
        if len(leaf.shape) == 2 and module != path and not routes:  # PEFT does not adapt routers
            name = module if module == HEAD else f"{table.prefix}{module}"
            site: Site = "rows" if module in row.tables else "product"
            found[module] = Target(path, name, site, leaf.shape, _fused(table, module))
    if config.tie_word_embeddings:
        found[HEAD] = found[row.tokens]._replace(name=HEAD, site="head")
    return found


def _fused(table: Architecture, module: str) -> str:
    """Return Hugging Face's name of the fused module that contains ours, or ""."""
    for layout in table.layouts:
        for name in layout.ours if isinstance(layout, Fused) else ():
            if module.endswith(f".{name}"):
                return f"{table.prefix}{module.removesuffix(name)}{layout.theirs}"
    return ""


def plan(config: ModelConfig, lora: LoraConfig) -> dict[str, Low]:
    """Return the adapter's rank and scale for each of its modules, by our module paths.

    Raises ConfigError, listing the valid names, if a name or the whole selection matches nothing.
    """
    targets = targets_of(config)
    names = [name for target in targets.values() for name in target.names]
    wanted = _named(lora.target_modules, names, "target_modules")
    excluded = _named(lora.exclude_modules or (), names, "exclude_modules")
    chosen = {m for m, t in targets.items() if _is_chosen(lora, m, t, wanted, excluded)}
    if unmatched := _unmatched(lora, targets.values()):
        experts = models.family(config.model_type).router is not None
        raise ConfigError(
            f"target_modules: {', '.join(map(repr, unmatched))} matches no module of this model;"
            f" expected one of {_known(targets)}"
            f"{' (experts and routers cannot have an adapter)' if experts else ''}"
        )
    if not chosen:
        raise ConfigError(
            f"the adapter's target_modules or rules select no module; expected one of"
            f" {_known(targets)}"
        )
    ranks = _by_pattern(lora.rank_pattern, names, "rank_pattern")
    alphas = _by_pattern(lora.alpha_pattern, names, "alpha_pattern")
    found = {}
    for module in (m for m in targets if m in chosen):
        rank = _first(ranks, targets[module].names, lora.r)
        alpha = _first(alphas, targets[module].names, lora.lora_alpha)
        found[module] = Low(targets[module], rank, lora.scale(rank, alpha), alpha)
    return found


def shortest(names: Iterable[str], targets: Iterable[Target]) -> list[str]:
    """Return a shortest list of target_modules that selects exactly these names."""
    chosen = set(names)
    ends = sorted({name.rpartition(".")[2] for name in chosen})
    if {t.name for t in targets if _ends_in(t.name, ends)} == chosen:
        return ends
    return sorted(chosen)


def _is_chosen(
    lora: LoraConfig, module: str, target: Target, wanted: set[str], excluded: set[str]
) -> bool:
    """Return whether the adapter has this module; wanted, excluded: names matched by its fields."""
    if lora.rules is not None:
        return bool(first_match(lora.rules, f"{module}.weight"))
    if not excluded.isdisjoint(target.names):
        return False
    if isinstance(lora.target_modules, str) and lora.target_modules.lower() == ALL_LINEAR:
        return target.site == "product" and module != HEAD
    return any(name in wanted and _in_layers(lora, name) for name in target.names)


def _named(wanted: Names, names: Sequence[str], what: str) -> set[str]:
    """Return the names that a PEFT field matches: a regex, or a list of suffixes."""
    if isinstance(wanted, str):
        return match_names(wanted, names, what)
    return {name for name in names if _ends_in(name, wanted)}


def _ends_in(name: str, ends: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _in_layers(lora: LoraConfig, name: str) -> bool:
    """Return whether `layers_to_transform` includes a module, by the first number in its name."""
    wanted, pattern = lora.layers_to_transform, lora.layers_pattern
    if wanted is None or wanted == [] or wanted == ():
        return True
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal() and i > 1), None)
    if number is None:
        return False
    called = [pattern] if isinstance(pattern, str) else list(pattern or ())
    if called and parts[number - 1] not in called:
        return False
    return int(parts[number]) in ([wanted] if isinstance(wanted, int) else wanted)


def _by_pattern(
    patterns: Mapping[str, V], names: Sequence[str], what: str
) -> list[tuple[set[str], V]]:
    """Return for each pattern the names with a dotted suffix that matches, and its value."""
    return [
        (match_names(rf"(.*\.)?({pattern})", names, what), value)
        for pattern, value in patterns.items()
    ]


def _first(found: Iterable[tuple[set[str], V]], names: Iterable[str], otherwise: V) -> V:
    """Return the value of the first pattern that matches one of these names."""
    return next((value for some, value in found if not some.isdisjoint(names)), otherwise)


def _unmatched(lora: LoraConfig, targets: Iterable[Target]) -> list[str]:
    """Return the entries of target_modules that match no module."""
    if lora.rules is not None or isinstance(lora.target_modules, str):
        return []
    names = [name for target in targets for name in target.names]
    return [end for end in lora.target_modules if not any(_ends_in(n, [end]) for n in names)]


def _known(targets: Mapping[str, Target]) -> str:
    return ", ".join(dict.fromkeys(n.rpartition(".")[2] for t in targets.values() for n in t.names))
