"""Target modules of a LoRA configuration, with rank and scale: by PEFT's name rules or path rules.

PEFT uses Hugging Face's module names: our paths with the prefix from the checkpoint's table.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from jaxllm import models
from jaxllm.adapters.lora_config import ALL_LINEAR, LoraConfig, Names
from jaxllm.config.model import ModelConfig
from jaxllm.convert.fused_layouts import FusedLayout, RenamedLayout
from jaxllm.convert.hf import write_config
from jaxllm.convert.tables import Architecture
from jaxllm.errors import ConfigError
from jaxllm.files import match_names
from jaxllm.weights.paths import first_match, flatten
from jaxllm.weights.types.lora import LoraSite

HEAD = "lm_head"
V = TypeVar("V")


class TargetModule(NamedTuple):
    """A module that can have an adapter.

    path: parameter path of its weight; for a tied head, that of the token embedding. name: Hugging
    Face's name. site: which use of the weight the adapter changes. shape: `(O, I)`. fused_name:
    Hugging Face's name of the fused module that contains this one, or "".
    """

    path: str
    name: str
    site: LoraSite
    shape: tuple[int, int]
    fused_name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that rules may match."""
        return (self.name, self.fused_name) if self.fused_name else (self.name,)


class LoraSpec(NamedTuple):
    """Rank, scale and alpha of the adapter of one module."""

    target: TargetModule
    rank: int
    scale: float
    alpha: float


def list_targets(config: ModelConfig) -> dict[str, TargetModule]:
    """Return a model's linear layers and embeddings by module path, including a tied head."""
    row = models.get_family(config.model_type)
    _, table = write_config(config)
    targets = {}
    for path, leaf in flatten(models.param_shapes(models.build(config))):
        module = path.removesuffix(".weight")
        routes = row.router is not None and module.endswith(f".{row.router}")
        if len(leaf.shape) == 2 and module != path and not routes:  # PEFT does not adapt routers
            name = module if module == HEAD else f"{table.prefix}{_published_name(table, module)}"
            site: LoraSite = "rows" if module in row.embedding_tables else "product"
            targets[module] = TargetModule(path, name, site, leaf.shape, _fused_name(table, module))
    if config.tie_word_embeddings:
        targets[HEAD] = targets[row.token_table]._replace(name=HEAD, site="head")
    return targets


def _published_name(table: Architecture, module: str) -> str:
    """Return the checkpoint's name of a module."""
    for layout in table.layouts:
        if isinstance(layout, RenamedLayout):
            module = layout.rename(f"{module}.weight").removesuffix(".weight")
    return module


def _fused_name(table: Architecture, module: str) -> str:
    """Return Hugging Face's name of the fused module that contains this one, or ""."""
    for layout in table.layouts:
        if isinstance(layout, FusedLayout):
            for name in layout.parts:
                if module.endswith(f".{name}"):
                    return f"{table.prefix}{module.removesuffix(name)}{layout.fused}"
    return ""


def resolve_targets(config: ModelConfig, lora: LoraConfig) -> dict[str, LoraSpec]:
    """Return the adapter's rank and scale for each of its modules, by our module paths.

    Raises ConfigError, listing the valid names, if a name or the whole selection matches nothing.
    """
    targets = list_targets(config)
    names = [name for target in targets.values() for name in target.names]
    wanted = _match_field(lora.target_modules, names, "target_modules")
    excluded = _match_field(lora.exclude_modules or (), names, "exclude_modules")
    chosen = {m for m, t in targets.items() if _is_chosen(lora, m, t, wanted, excluded)}
    if unmatched := _find_unmatched(lora, targets.values()):
        experts = models.get_family(config.model_type).router is not None
        raise ConfigError(
            f"target_modules: {', '.join(map(repr, unmatched))} matches no module of this model;"
            f" expected one of {_list_names(targets)}"
            f"{' (experts and routers cannot have an adapter)' if experts else ''}"
        )
    if not chosen:
        raise ConfigError(
            f"the adapter's target_modules or rules select no module; expected one of"
            f" {_list_names(targets)}"
        )
    ranks = _match_patterns(lora.rank_pattern, names, "rank_pattern")
    alphas = _match_patterns(lora.alpha_pattern, names, "alpha_pattern")
    specs = {}
    for module in (m for m in targets if m in chosen):
        rank = _pattern_value(ranks, targets[module].names, lora.r)
        alpha = _pattern_value(alphas, targets[module].names, lora.lora_alpha)
        specs[module] = LoraSpec(targets[module], rank, lora.scale(rank, alpha), alpha)
    return specs


def shorten_names(names: Iterable[str], targets: Iterable[TargetModule]) -> list[str]:
    """Return a shortest list of target_modules that selects exactly these names."""
    chosen = set(names)
    ends = sorted({name.rpartition(".")[2] for name in chosen})
    if {t.name for t in targets if _has_suffix(t.name, ends)} == chosen:
        return ends
    return sorted(chosen)


def _is_chosen(
    lora: LoraConfig, module: str, target: TargetModule, wanted: set[str], excluded: set[str]
) -> bool:
    """Return whether the adapter has this module; wanted, excluded: names matched by its fields."""
    if lora.rules is not None:
        return bool(first_match(lora.rules, f"{module}.weight"))
    if not excluded.isdisjoint(target.names):
        return False
    if isinstance(lora.target_modules, str) and lora.target_modules.lower() == ALL_LINEAR:
        return target.site == "product" and module != HEAD
    return any(name in wanted and _is_in_layers(lora, name) for name in target.names)


def _match_field(wanted: Names, names: Sequence[str], what: str) -> set[str]:
    """Return the names that a PEFT field matches: a regex, or a list of suffixes."""
    if isinstance(wanted, str):
        return match_names(wanted, names, what)
    return {name for name in names if _has_suffix(name, wanted)}


def _has_suffix(name: str, ends: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _is_in_layers(lora: LoraConfig, name: str) -> bool:
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


def _match_patterns(
    patterns: Mapping[str, V], names: Sequence[str], what: str
) -> list[tuple[set[str], V]]:
    """Return for each pattern the names with a dotted suffix that matches, and its value."""
    return [
        (match_names(rf"(.*\.)?({pattern})", names, what), value)
        for pattern, value in patterns.items()
    ]


def _pattern_value(matches: Iterable[tuple[set[str], V]], names: Iterable[str], default: V) -> V:
    """Return the value of the first pattern that matches one of these names."""
    return next((value for some, value in matches if not some.isdisjoint(names)), default)


def _find_unmatched(lora: LoraConfig, targets: Iterable[TargetModule]) -> list[str]:
    """Return the entries of target_modules that match no module."""
    if lora.rules is not None or isinstance(lora.target_modules, str):
        return []
    names = [name for target in targets for name in target.names]
    return [end for end in lora.target_modules if not any(_has_suffix(n, [end]) for n in names)]


def _list_names(targets: Mapping[str, TargetModule]) -> str:
    return ", ".join(dict.fromkeys(n.rpartition(".")[2] for t in targets.values() for n in t.names))
