"""What an adapter is asked to be, in PEFT's words (`peft.LoraConfig`, version 0.21)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta

from jaxllm.errors import ConfigError
from jaxllm.files import check_name_pattern, compile_pattern, complaints_of

Names = str | Sequence[str]
Rank = Annotated[int, Meta(ge=1, le=1 << 16)]
Alpha = Annotated[float, Meta(gt=-1e9, lt=1e9)]
LayerNumber = Annotated[int, Meta(ge=0)]

ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA (or DoRA) of some modules.

    r: the rank. lora_alpha: the scale is lora_alpha / r, with use_rslora lora_alpha / sqrt(r)
    (Kalajdzievski 2023). lora_dropout: of the inputs, while training. use_dora: lengths of rows of
    their own.

    target_modules: a list of names, each the end of a module's name; a regex of whole names; or
    "all-linear", all but the head. Names are Hugging Face's (`model.layers.0.self_attn.q_proj`),
    tables of tokens too. exclude_modules: likewise, what is left out. layers_to_transform: of a
    list, in these layers alone; layers_pattern: what layers are called there. rules: in place of
    all these, ordered rows `(regex, whether)` over our own paths, as `weights.paths` has them.
    rank_pattern, alpha_pattern: for names that end so (a regex), other ranks and alphas.

    init_lora_weights: of A, "kaiming" (uniform within 1 / sqrt(I)) or "gaussian" (of deviation
    1 / r); B is zero. Of a table of tokens A is zero, and B normal.

    Raises ConfigError for values out of their range.
    """

    r: Rank = 8
    lora_alpha: Alpha = 8.0
    lora_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    target_modules: Names = ALL_LINEAR
    exclude_modules: Names | None = None
    layers_to_transform: LayerNumber | Sequence[LayerNumber] | None = None
    layers_pattern: Names | None = None
    rules: Sequence[tuple[str, bool]] | None = None
    rank_pattern: Mapping[str, Rank] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, Alpha] = dataclasses.field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: Literal["kaiming", "gaussian"] = "kaiming"

    def __post_init__(self) -> None:
        if complaints := complaints_of(self):
            raise ConfigError(f"the adapter's configuration: {'; '.join(complaints)}")
        by_regex = isinstance(self.target_modules, str)
        if by_regex and (self.layers_to_transform is not None or self.layers_pattern):
            raise ConfigError(
                "layers_to_transform and layers_pattern go with a list of target_modules; a regex"
                " says which layers itself"
            )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ConfigError("layers_pattern goes with layers_to_transform, which is missing")
        for regex, _ in self.rules or ():
            compile_pattern(regex, "rules")
        for name, pattern in self._patterns():
            check_name_pattern(pattern, name)

    def scale(self, rank: int, alpha: float) -> float:
        """What is between the two matrices, times which their product is added."""
        return alpha / rank**0.5 if self.use_rslora else alpha / rank

    def _patterns(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        if isinstance(self.target_modules, str):
            found.append(("target_modules", self.target_modules))
        if isinstance(self.exclude_modules, str):
            found.append(("exclude_modules", self.exclude_modules))
        found += [("rank_pattern", regex) for regex in self.rank_pattern]
        return found + [("alpha_pattern", regex) for regex in self.alpha_pattern]
