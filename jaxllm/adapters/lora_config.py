"""LoRA configuration, with the field names of `peft.LoraConfig` (version 0.21)."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta

from jaxllm.errors import ConfigError
from jaxllm.files import compile_pattern, match_names
from jaxllm.runtime.schema import check_fields

Names = str | Sequence[str]
Rank = Annotated[int, Meta(ge=1, le=1 << 16)]
Alpha = Annotated[float, Meta(gt=-1e9, lt=1e9)]
LayerNumber = Annotated[int, Meta(ge=0)]

ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA (or DoRA) configuration. Raises ConfigError for invalid values.

    Module names are Hugging Face's (`model.layers.0.self_attn.q_proj`) and include the token
    embedding.

    Attributes:
        r: LoRA rank.
        lora_alpha: The scale is lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.
        lora_dropout: Dropout of the adapter's inputs, 0 to 1.
        target_modules: A list of module names or their dotted suffixes, a regex that matches whole
            names, or "all-linear" for all linear layers but the head.
        exclude_modules: Modules to leave out: a list or a regex, as above.
        layers_to_transform: Restrict a list of target_modules to these layers.
        layers_pattern: Name of the module list that layers_to_transform refers to.
        rules: Instead of all these, ordered rows `(regex, selected)` over our own parameter paths,
            as in `weights.paths`.
        rank_pattern, alpha_pattern: Ranks and alphas for names with a suffix that matches a regex.
        use_rslora: Scale by alpha / sqrt(rank) (Kalajdzievski 2023).
        use_dora: DoRA: a separate magnitude per output row.
        init_lora_weights: "kaiming" (A uniform within 1 / sqrt(I)) or "gaussian" (A with standard
            deviation 1 / r); B is zero. For a token embedding, A is zero and B is normal.
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
        check_fields(self, "the adapter's configuration: ")
        by_regex = isinstance(self.target_modules, str)
        if by_regex and (self.layers_to_transform is not None or self.layers_pattern):
            raise ConfigError(
                "layers_to_transform and layers_pattern require a list of target_modules; a regex"
                " selects the layers itself"
            )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ConfigError("layers_pattern requires layers_to_transform, which is missing")
        for regex, _ in self.rules or ():
            compile_pattern(regex, "rules")
        patterns: dict[str, Iterable[str]] = {
            "target_modules": [x] if isinstance(x := self.target_modules, str) else [],
            "exclude_modules": [y] if isinstance(y := self.exclude_modules, str) else [],
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
        }
        for name, regexes in patterns.items():
            for regex in regexes:
                match_names(regex, (), name)  # it compiles

    def scale(self, rank: int, alpha: float) -> float:
        """Return the factor of the product of the two matrices."""
        return alpha / rank**0.5 if self.use_rslora else alpha / rank
